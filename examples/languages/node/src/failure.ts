// Describes failed calls: the gRPC code, and the reason of errors.proto.

import { status, type ServiceError } from "@grpc/grpc-js";
import { ErrorInfo, Status } from "../gen/google/rpc/status.js";

const DOMAIN = "residuum.dev";
const ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo";

/** Tell whether an error is a call's, with a gRPC code and metadata. */
export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "metadata" in error;
}

/** Return why a call failed, such as "UNKNOWN_CAPTURE"; "" if the call did not reach the server. */
export function reasonOf(error: ServiceError): string {
  for (const value of error.metadata.get("grpc-status-details-bin")) {
    if (typeof value === "string") continue; // values of -bin keys are buffers
    for (const detail of Status.decode(value).details) {
      if (detail.typeUrl !== ERROR_INFO) continue;
      const info = ErrorInfo.decode(detail.value);
      if (info.domain === DOMAIN) return info.reason;
    }
  }
  return "";
}

/** Return a line that describes an error to the user: `NOT_FOUND (UNKNOWN_CAPTURE): …`. */
export function describe(error: unknown): string {
  if (!isServiceError(error)) return error instanceof Error ? error.message : String(error);
  const reason = reasonOf(error);
  return `${status[error.code]}${reason ? ` (${reason})` : ""}: ${error.details}`;
}
