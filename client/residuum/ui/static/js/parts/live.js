// Grids of open captures, which grow while their requests generate.
import { useEffect, useRef, useState } from "../core/lib.js";
import { Failure, floats, stream } from "../core/api.js";

const MOST_COLUMNS = 1024;
const SAMPLE = 1024; // values of a layer from which the colours are computed
const PAUSE = 100; // milliseconds in which the page draws what has come once
const NOTHING = { grid: null, error: null };

// The grid of an open capture. Without `wanted` there is none.
export const useLive = (wanted) => useLives([wanted])[0];

// The grids of several open captures. They share one stream: a browser opens at most six connections to a host, and each
// reply of Generate takes one, too. What has come of a capture stays when the others change.
export function useLives(wanted) {
  const keys = wanted.map((item) => (item ? JSON.stringify(item) : ""));
  const known = useRef(new Map());
  const [states, setStates] = useState(new Map());
  useEffect(() => {
    const asked = [...new Set(keys.filter(Boolean))];
    for (const key of known.current.keys()) if (!asked.includes(key)) known.current.delete(key);
    setStates((before) => new Map(asked.map((key) => [key, { grid: before.get(key)?.grid ?? null, error: null }])));
    if (!asked.length) return undefined;
    const stop = new AbortController();
    const changed = new Set();
    let timer = 0;
    const change = (key, changes) => setStates((before) => new Map(before).set(key, { ...(before.get(key) ?? NOTHING), ...changes }));
    const paint = () => {
      timer = 0;
      for (const key of changed) change(key, { grid: known.current.get(key).grid() });
      changed.clear();
    };
    const onEvent = (event, data) => {
      const key = asked[data.index];
      if (event === "problem") change(key, { error: new Failure(data.message, 0, data.kind) });
      if (event === "start" && !known.current.has(key)) known.current.set(key, new Growing(data.layers, JSON.parse(key).whole));
      if (event !== "tiles") return;
      for (const { layer, first, values } of data.tiles) known.current.get(key).put(layer, first, floats(values));
      changed.add(key);
      if (!timer) timer = setTimeout(paint, PAUSE);
    };
    stream("live", { body: { captures: asked.map((key) => JSON.parse(key)) }, onEvent, signal: stop.signal }).catch((error) => {
      if (!stop.signal.aborted) for (const key of asked) change(key, { error });
    });
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [keys.join(" ")]);
  return keys.map((key) => states.get(key) ?? NOTHING);
}

// The values of a capture that grows. The columns of its grid stand for 1, 2, 4, ... positions each, so that there are
// never more than the page can show, however long the capture becomes.
class Growing {
  // `whole`: the colours span all values, not the middle ones.
  constructor(layers, whole = false) {
    this.layers = layers;
    this.shares = whole ? [0, 1] : [0.02, 0.98];
    this.per = 1;
    this.positions = 0;
    this.columns = layers.map(() => new Float32Array(MOST_COLUMNS).fill(NaN));
    this.rows = layers.map(() => new Float32Array(MOST_COLUMNS).fill(NaN));
  }

  // Store the values of a layer from a position on.
  put(layer, first, values) {
    const index = this.layers.indexOf(layer);
    if (index < 0) return;
    const end = first + values.length;
    while (end > this.per * MOST_COLUMNS) this.halve();
    if (end > this.rows[index].length) this.rows[index] = longer(this.rows[index], end);
    this.rows[index].set(values, first);
    const columns = this.columns[index];
    for (let at = 0; at < values.length; at++) {
      const column = Math.floor((first + at) / this.per);
      columns[column] = further(columns[column], values[at]);
    }
    this.positions = Math.max(this.positions, end);
  }

  halve() {
    for (const columns of this.columns) {
      for (let at = 0; at < MOST_COLUMNS / 2; at++) columns[at] = further(columns[2 * at], columns[2 * at + 1]);
      columns.fill(NaN, MOST_COLUMNS / 2);
    }
    this.per *= 2;
  }

  grid() {
    const { layers, positions, per } = this;
    const columns = Math.ceil(positions / per);
    const values = new Float32Array(layers.length * columns);
    this.columns.forEach((row, index) => values.set(row.subarray(0, columns), index * columns));
    const ranges = this.rows.map((row) => edges(row.subarray(0, positions), this.shares));
    return { layers, first: 0, last: columns * per - 1, positions, columns, values, ranges, row: (layer) => this.rows[layers.indexOf(layer)]?.subarray(0, positions) ?? null };
  }
}

// The value that is further from 0, as the server shows several positions in one column.
function further(one, other) {
  if (Number.isNaN(one)) return other;
  return Number.isNaN(other) || Math.abs(one) > Math.abs(other) || (Math.abs(one) === Math.abs(other) && one > 0) ? one : other;
}

function longer(row, length) {
  const found = new Float32Array(2 ** Math.ceil(Math.log2(length))).fill(NaN);
  found.set(row);
  return found;
}

// As the server computes it for a capture that has ended: without the first position. Of a long row, a sample is enough.
function edges(row, [low, high]) {
  const step = Math.ceil(row.length / SAMPLE);
  const some = step > 1 ? Float32Array.from({ length: Math.floor((row.length - 1) / step) }, (_, at) => row[1 + at * step]) : row.subarray(1);
  const rest = some.filter(Number.isFinite);
  const there = (rest.length ? rest : row.subarray(0, 1).filter(Number.isFinite)).sort();
  return there.length ? [there[Math.min(Math.floor(low * there.length), there.length - 1)], there[Math.ceil(high * there.length) - 1]] : [null, null];
}
