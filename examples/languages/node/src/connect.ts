// Channels to both services. They use the same environment variables as residuum's own client.

import { readFileSync } from "node:fs";
import {
  credentials,
  InterceptingCall,
  Metadata,
  type CallOptions,
  type ChannelCredentials,
  type ClientOptions,
  type ClientUnaryCall,
  type Interceptor,
  type ServiceError,
} from "@grpc/grpc-js";
import { InferenceServiceClient } from "../gen/residuum/v1/inference.js";
import { StoreServiceClient } from "../gen/residuum/v1/store.js";

const UNARY_SECONDS = 90; // longer than the store waits for a capture to end

export interface Settings {
  endpoint: string;
  token: string;
  tlsCa: string;
  tlsServerName: string;
  clientCert: string;
  clientKey: string;
  insecure: boolean;
}

export function settingsFromEnvironment(): Settings {
  const { env } = process;
  return {
    endpoint: env["RESIDUUM_ENDPOINT"] ?? "localhost:50051",
    token: env["RESIDUUM_TOKEN"] ?? "",
    tlsCa: env["RESIDUUM_TLS_CA"] ?? "",
    tlsServerName: env["RESIDUUM_TLS_SERVER_NAME"] ?? "",
    clientCert: env["RESIDUUM_CLIENT_CERT"] ?? "",
    clientKey: env["RESIDUUM_CLIENT_KEY"] ?? "",
    insecure: env["RESIDUUM_INSECURE"] === "1",
  };
}

export function connectInference(settings: Settings): InferenceServiceClient {
  const { endpoint } = settings;
  return new InferenceServiceClient(endpoint, channelCredentials(settings), clientOptions(settings, endpoint));
}

export function connectStore(settings: Settings, endpoint: string): StoreServiceClient {
  return new StoreServiceClient(endpoint, channelCredentials(settings), clientOptions(settings, endpoint));
}

type Unary<Request, Response> = (
  request: Request,
  metadata: Metadata,
  options: Partial<CallOptions>,
  callback: (error: ServiceError | null, response: Response) => void,
) => ClientUnaryCall;

/** Make a call with one answer: `await unary(client.getCapture.bind(client), request)`. */
export function unary<Request, Response>(method: Unary<Request, Response>, request: Request): Promise<Response> {
  const deadline = Date.now() + 1000 * UNARY_SECONDS;
  return new Promise((resolve, reject) => {
    method(request, new Metadata(), { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function channelCredentials({ tlsCa, clientCert, clientKey }: Settings): ChannelCredentials {
  if (!tlsCa) return credentials.createInsecure();
  const key = clientKey ? readFileSync(clientKey) : null;
  const cert = clientCert ? readFileSync(clientCert) : null;
  return credentials.createSsl(readFileSync(tlsCa), key, cert);
}

function clientOptions(settings: Settings, endpoint: string): Partial<ClientOptions> {
  const options: Partial<ClientOptions> = {};
  if (settings.tlsServerName) options["grpc.ssl_target_name_override"] = settings.tlsServerName;
  if (settings.token) {
    if (!settings.tlsCa && !settings.insecure && !isLoopback(endpoint)) {
      throw new Error(
        `The token would be sent to ${endpoint} in plain text. Set RESIDUUM_TLS_CA, or RESIDUUM_INSECURE=1 to send it.`,
      );
    }
    options.interceptors = [bearer(settings.token)];
  }
  return options;
}

function bearer(token: string): Interceptor {
  return (options, nextCall) =>
    new InterceptingCall(nextCall(options), {
      start(metadata, listener, next) {
        metadata.set("authorization", `Bearer ${token}`);
        next(metadata, listener);
      },
    });
}

function isLoopback(endpoint: string): boolean {
  const host = endpoint.slice(0, endpoint.lastIndexOf(":"));
  return host === "localhost" || host === "[::1]" || /^127(\.\d+){3}$/.test(host);
}
