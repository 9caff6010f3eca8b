// Ranks the stores for a capture. The rule is in placement.proto.

import { createHash } from "node:crypto";
import type { StoreAddress } from "../gen/residuum/v1/placement.js";

const DOMAIN = "residuum.store.v1";

function score(name: string, captureId: string): bigint {
  const bytes = Buffer.from(name, "utf8");
  const length = Buffer.alloc(4);
  length.writeUInt32LE(bytes.length);
  const hash = createHash("sha256").update(DOMAIN, "ascii").update(length).update(bytes).update(captureId, "utf8");
  return hash.digest().readBigUInt64BE(0);
}

/** Return the stores in the order in which a reader asks them for a capture: the highest score first. */
export function ranked(stores: readonly StoreAddress[], captureId: string): StoreAddress[] {
  const scored = stores.map((store) => ({ store, score: score(store.name, captureId) }));
  scored.sort((a, b) => {
    if (a.score !== b.score) return a.score > b.score ? -1 : 1;
    return Buffer.compare(Buffer.from(a.store.name), Buffer.from(b.store.name));
  });
  return scored.map((item) => item.store);
}
