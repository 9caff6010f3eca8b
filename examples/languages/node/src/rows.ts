// Decodes chunks into float32 rows. The layouts are in capture.proto.

import { crc32c } from "@node-rs/crc32";
import { Encoding, type CaptureManifest, type Chunk, type ChunkHeader } from "../gen/residuum/v1/capture.js";
import { DataType } from "../gen/residuum/v1/tensor.js";

/** The rows of one sequence at one site, by layer and position, in any order. */
export class Rows {
  readonly #rows = new Map<string, Float32Array>();

  /** The number of rows. */
  get count(): number {
    return this.#rows.size;
  }

  /** Add the rows of a chunk. Throws if the chunk is damaged or has an unsupported encoding. */
  add(chunk: Chunk): void {
    const header = chunk.header;
    if (header === undefined || header.layers.length === 0 || header.positions.length === 0 || header.width === 0) {
      throw new Error("A chunk has no layer, no position or no width.");
    }
    if (crc32c(chunk.payload) !== chunk.crc32c) throw new Error("A chunk's payload does not match its CRC-32C.");
    const values = decode(chunk.payload, elementType(header));
    const { layers, positions, width } = header;
    if (values.length !== layers.length * positions.length * width) {
      throw new Error(`A chunk has ${values.length} numbers for ${layers.length} × ${positions.length} rows of ${width}.`);
    }
    let at = 0;
    for (const layer of layers) {
      for (const position of positions) {
        this.#rows.set(key(layer, position), values.subarray(at, at + width));
        at += width;
      }
    }
  }

  /** Return the rows of these layers and positions as one array, [layers][positions][width]. */
  array({ layers, positions, width }: Shape): Float32Array {
    const values = new Float32Array(layers.length * positions.length * width);
    let at = 0;
    for (const layer of layers) {
      for (const position of positions) {
        const row = this.#rows.get(key(layer, position));
        if (row === undefined) throw new Error(`The row of layer ${layer} at position ${position} is missing.`);
        values.set(row, at);
        at += width;
      }
    }
    return values;
  }
}

export interface Shape {
  layers: number[];
  positions: number[];
  width: number;
}

/** Return the rows that count, from the manifest of a complete capture of one sequence and site. */
export function shapeOf(manifest: CaptureManifest): Shape {
  const [present, ...others] = manifest.present;
  if (present === undefined || others.length > 0) {
    throw new Error(`This example reads one sequence and site, but the capture has ${manifest.present.length}.`);
  }
  const positions = present.positions.flatMap(({ first, last }) =>
    Array.from({ length: last - first + 1 }, (_, index) => first + index),
  );
  return { layers: present.layers, positions, width: manifest.description?.hiddenSize ?? 0 };
}

function key(layer: number, position: number): string {
  return `${layer}/${position}`;
}

/** Return the element type of a chunk's payload. RAW has the model's own type. */
function elementType(header: ChunkHeader): DataType {
  switch (header.encoding) {
    case Encoding.ENCODING_RAW:
      return header.dtype;
    case Encoding.ENCODING_FP32:
      return DataType.DATA_TYPE_FLOAT32;
    case Encoding.ENCODING_FP16:
      return DataType.DATA_TYPE_FLOAT16;
    case Encoding.ENCODING_BF16:
      return DataType.DATA_TYPE_BFLOAT16;
    default:
      throw new Error(`Rows encoded as ${Encoding[header.encoding] ?? header.encoding} are not supported here.`);
  }
}

/** Return little-endian elements as float32, which holds every value of the narrower types exactly. */
function decode(payload: Buffer, dtype: DataType): Float32Array {
  const bytes = dtype === DataType.DATA_TYPE_FLOAT32 ? 4 : 2;
  if (payload.length % bytes !== 0) throw new Error(`A payload of ${payload.length} bytes ends within a number.`);
  const view = new DataView(payload.buffer, payload.byteOffset, payload.length);
  const bits = new Uint32Array(payload.length / bytes);
  switch (dtype) {
    case DataType.DATA_TYPE_FLOAT32:
      for (let i = 0; i < bits.length; i++) bits[i] = view.getUint32(4 * i, true);
      break;
    case DataType.DATA_TYPE_BFLOAT16: // the upper half of a float32
      for (let i = 0; i < bits.length; i++) bits[i] = view.getUint16(2 * i, true) << 16;
      break;
    case DataType.DATA_TYPE_FLOAT16:
      for (let i = 0; i < bits.length; i++) bits[i] = float32Bits(view.getUint16(2 * i, true));
      break;
    default:
      throw new Error(`Elements of type ${DataType[dtype] ?? dtype} are not supported here.`);
  }
  return new Float32Array(bits.buffer);
}

/** Return the bits of the float32 that equals a binary16, given by its bits. */
function float32Bits(half: number): number {
  const sign = (half & 0x8000) << 16;
  const exponent = (half >> 10) & 0x1f;
  const fraction = half & 0x3ff;
  if (exponent === 0x1f) return sign | 0x7f800000 | (fraction << 13); // infinity and NaN
  if (exponent !== 0) return sign | ((exponent + 112) << 23) | (fraction << 13);
  if (fraction === 0) return sign;
  const shift = Math.clz32(fraction) - 21; // subnormal: until the leading one is where it is implied
  return sign | ((113 - shift) << 23) | (((fraction << shift) & 0x3ff) << 13);
}
