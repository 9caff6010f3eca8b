// Steering vectors and their digests. The rule is in tensor.proto.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { DataType, Vector } from "../gen/residuum/v1/tensor.js";

const DOMAIN = "residuum.vector.v1";
const FLOAT32_BYTES = 4;

/** Return the digest of a float32 vector: the SHA-256 of the domain, the dtype, the length and the values. */
export function digestOf(values: Buffer): Buffer {
  const head = Buffer.alloc(12);
  head.writeUInt32LE(DataType.DATA_TYPE_FLOAT32, 0);
  head.writeBigUInt64LE(BigInt(values.length / FLOAT32_BYTES), 4);
  return createHash("sha256").update(DOMAIN, "ascii").update(head).update(values).digest();
}

/** Read a vector from a file of little-endian float32, the form in which it is sent. */
export function readVector(path: string, length: number): Vector {
  const values = readFileSync(path);
  if (values.length !== length * FLOAT32_BYTES) {
    throw new Error(
      `${path} has ${values.length} bytes; a vector for this model is ${length} float32, ${length * FLOAT32_BYTES} bytes.`,
    );
  }
  return { digest: digestOf(values), dtype: DataType.DATA_TYPE_FLOAT32, values };
}
