// Steers with the caller's vector, generates, follows the capture while it runs, and reads it again.
//
//   node build/src/main.js VECTOR OUT [raw|fp32|fp16|bf16]
//
// VECTOR is a file of little-endian float32, as many as the model's hidden size. OUT is a folder. ../README.md
// describes the files in OUT, and the environment variables for the connection.

import { mkdirSync, writeFileSync } from "node:fs";
import { endianness } from "node:os";
import { join } from "node:path";
import { status, type ClientReadableStream } from "@grpc/grpc-js";
import { CaptureManifest, CaptureState, Encoding } from "../gen/residuum/v1/capture.js";
import {
  GenerateRequest,
  GetModelInfoRequest,
  RegisterRequestRequest,
  type CaptureHandle,
  type GenerateResponse,
  type GetModelInfoResponse,
  type InferenceServiceClient,
  type PutVectorsResponse,
} from "../gen/residuum/v1/inference.js";
import { ErrorReason } from "../gen/residuum/v1/errors.js";
import {
  GetCaptureRequest,
  ReadChunksRequest,
  type ReadChunksResponse,
  type StoreServiceClient,
} from "../gen/residuum/v1/store.js";
import type { Vector } from "../gen/residuum/v1/tensor.js";
import { connectInference, connectStore, settingsFromEnvironment, unary, type Settings } from "./connect.js";
import { describe, isServiceError, reasonOf } from "./failure.js";
import { ranked } from "./placement.js";
import { Rows, shapeOf } from "./rows.js";
import { readVector } from "./vector.js";

const PROMPT = "The most surprising thing about the ocean is";
const MAX_TOKENS = 64;
const SCALE = 4;
const WAIT_SECONDS = 60n;

const ENCODINGS = new Map([
  ["raw", Encoding.ENCODING_RAW],
  ["fp32", Encoding.ENCODING_FP32],
  ["fp16", Encoding.ENCODING_FP16],
  ["bf16", Encoding.ENCODING_BF16],
]);

async function main(): Promise<void> {
  const [vectorFile, out, encodingName = "raw", ...others] = process.argv.slice(2);
  const encoding = ENCODINGS.get(encodingName);
  if (vectorFile === undefined || out === undefined || encoding === undefined || others.length > 0) {
    console.error("usage: node build/src/main.js VECTOR OUT [raw|fp32|fp16|bf16]");
    process.exitCode = 2;
    return;
  }
  const settings = settingsFromEnvironment();
  const inference = connectInference(settings);
  try {
    const info = await unary(inference.getModelInfo.bind(inference), GetModelInfoRequest.create());
    const vector = readVector(vectorFile, info.hiddenSize);
    const registration = await register(inference, info, vector, encoding);
    const reply = await generateAndFollow(inference, settings, registration.requestId);
    const read = await readAgain(settings, info, registration.requestId);
    const shape = shapeOf(read.manifest);

    mkdirSync(out, { recursive: true });
    writeFileSync(join(out, "rows.f32"), littleEndian(read.rows.array(shape)));
    writeFileSync(join(out, "followed.f32"), littleEndian(reply.followed.array(shape)));
    const summary = {
      request_id: registration.requestId,
      store: reply.handle.store,
      asked: read.asked,
      state: CaptureState[read.manifest.state],
      digest: vector.digest.toString("hex"),
      vectors_sent: registration.vectorsSent,
      prompt_token_ids: read.manifest.description?.promptTokenIds,
      generated_token_ids: reply.tokenIds,
      text: reply.text,
      rows_before_end: reply.rowsBeforeEnd,
      ...shape,
    };
    writeFileSync(join(out, "capture.json"), JSON.stringify(summary, null, 2) + "\n");
    console.log(`${shape.layers.length} layers × ${shape.positions.length} positions × ${shape.width}:${reply.text}`);
  } finally {
    inference.close();
  }
}

/** Register a request that captures two layers and is steered after the first; send the vector if the server lacks it. */
async function register(
  inference: InferenceServiceClient,
  info: GetModelInfoResponse,
  vector: Vector,
  encoding: Encoding,
): Promise<{ requestId: string; vectorsSent: number }> {
  const [middle, last] = [Math.floor(info.numLayers / 2), info.numLayers - 1];
  const request = RegisterRequestRequest.create({
    spec: {
      capture: { layers: layerList(middle, last), encoding },
      steering: {
        operations: [
          {
            layers: layerList(middle),
            operation: { $case: "add", value: { digest: vector.digest, scale: SCALE } },
          },
        ],
      },
    },
  });
  const answer = await unary(inference.registerRequest.bind(inference), request);
  const missing = answer.missingDigests.some((digest) => digest.equals(vector.digest));
  if (missing) await putVectors(inference, [vector]);
  return { requestId: answer.requestId, vectorsSent: missing ? 1 : 0 };
}

function layerList(...layers: number[]) {
  return { selection: { $case: "list", value: { layers } } } as const;
}

/** Send vectors. Each has its own result. Throws if one is refused. */
async function putVectors(inference: InferenceServiceClient, vectors: Vector[]): Promise<void> {
  const answer = await new Promise<PutVectorsResponse>((resolve, reject) => {
    const call = inference.putVectors((error, response) => (error ? reject(error) : resolve(response)));
    for (const vector of vectors) call.write({ vector });
    call.end();
  });
  for (const { digest, error } of answer.results) {
    if (error) throw new Error(`${ErrorReason[error.reason]}: vector ${digest.toString("hex")}: ${error.message}`);
  }
}

interface Followed {
  handle: CaptureHandle;
  tokenIds: number[];
  text: string;
  followed: Rows;
  /** Rows that had arrived when the last token was generated. */
  rowsBeforeEnd: number;
}

/** Generate, and follow the capture at the same time. */
async function generateAndFollow(
  inference: InferenceServiceClient,
  settings: Settings,
  requestId: string,
): Promise<Followed> {
  const generation: ClientReadableStream<GenerateResponse> = inference.generate(
    GenerateRequest.create({
      target: { $case: "requestId", value: requestId },
      prompt: { $case: "text", value: PROMPT },
      sampling: { maxTokens: MAX_TOKENS, temperature: 0, ignoreEos: true },
    }),
  );
  const events: AsyncIterator<GenerateResponse> = generation[Symbol.asyncIterator]();
  let store: StoreServiceClient | undefined;
  try {
    const started = (await events.next()).value?.event;
    if (started?.$case !== "started" || started.value.capture === undefined) {
      throw new Error("The generation did not begin with a capture.");
    }
    const handle = started.value.capture;
    store = connectStore(settings, handle.storeEndpoint);
    const followed = new Rows();
    const follow = readChunks(store, ReadChunksRequest.create({ captureId: handle.captureId, follow: true }), followed);
    const generate = async () => {
      const tokenIds: number[] = [];
      let text = "";
      for await (const { event } of { [Symbol.asyncIterator]: () => events }) {
        if (event?.$case === "delta") {
          tokenIds.push(...event.value.tokenIds);
          text += event.value.text;
        } else if (event?.$case === "finished") {
          return { tokenIds, text, rowsBeforeEnd: followed.count };
        }
      }
      throw new Error("The generation broke off.");
    };
    const [reply] = await Promise.all([generate(), follow]);
    return { handle, followed, ...reply };
  } finally {
    generation.cancel(); // has no effect on a generation that has ended
    store?.close();
  }
}

/** Read an ended capture from its store. Stores are asked in the order of their ranks. */
async function readAgain(
  settings: Settings,
  info: GetModelInfoResponse,
  captureId: string,
): Promise<{ manifest: CaptureManifest; rows: Rows; asked: string[] }> {
  const asked: string[] = [];
  for (const address of ranked(info.stores, captureId)) {
    const store = connectStore(settings, address.endpoint);
    asked.push(address.name);
    try {
      const request = GetCaptureRequest.create({ captureId, wait: { seconds: WAIT_SECONDS, nanos: 0 } });
      const { manifest } = await unary(store.getCapture.bind(store), request);
      if (manifest?.state !== CaptureState.CAPTURE_STATE_COMPLETE) {
        throw new Error(`The capture is ${CaptureState[manifest?.state ?? 0]}: ${manifest?.incompleteDetail}`);
      }
      const rows = new Rows();
      return { manifest: await readChunks(store, ReadChunksRequest.create({ captureId }), rows), rows, asked };
    } catch (error) {
      const elsewhere = isServiceError(error) && error.code === status.NOT_FOUND && reasonOf(error) === "UNKNOWN_CAPTURE";
      if (!elsewhere) throw error;
    } finally {
      store.close();
    }
  }
  throw new Error(`No store holds ${captureId}; asked: ${asked.join(", ")}.`);
}

/** Read chunks into `rows`; return the last manifest, which lists the rows that count. */
async function readChunks(store: StoreServiceClient, request: ReadChunksRequest, rows: Rows): Promise<CaptureManifest> {
  let manifest: CaptureManifest | undefined;
  const responses: AsyncIterable<ReadChunksResponse> = store.readChunks(request);
  for await (const { content } of responses) {
    if (content?.$case === "chunk") rows.add(content.value);
    else if (content?.$case === "manifest") manifest = content.value;
  }
  if (manifest === undefined) throw new Error("The store sent no manifest.");
  return manifest;
}

function littleEndian(values: Float32Array): Buffer {
  const bytes = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
  return endianness() === "LE" ? bytes : bytes.swap32();
}

main().catch((error: unknown) => {
  console.error(describe(error));
  process.exitCode = 1;
});
