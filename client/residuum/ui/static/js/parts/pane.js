// One capture: its heat map and its tokens.
import { html, useEffect, useMemo, useRef, useState } from "../core/lib.js";
import { floats, get } from "../core/api.js";
import { rangesFor } from "../core/colors.js";
import { saveCsv, savePng } from "../core/download.js";
import { number, oneLine, wholeNumber } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { Problem } from "./basics.js";
import { figureOf, HeatMap, Legend, startOf } from "./heatmap.js";
import { useLive } from "./live.js";
import { title } from "./choices.js";
import { Tokens } from "./tokens.js";

const COLUMNS = 1024;

// `state` has the window (first, last) and the chosen position; `change` changes them. `span`: positions to show at least.
// `shared` and `onRanges`: two panes have the same colours; each says its own ranges, and gets those of both.
export function Pane({ manifest, chosen, state, change, name, span = 0, shared, onRanges }) {
  const { site, sequence, layer, asked, scale, each, rows } = chosen;
  const wanted = { id: manifest.id, site: site.name, sequence, ...asked };
  const isOpen = manifest.state === "open";
  const keys = [wanted, manifest.opened, manifest.state]; // another capture may have the ID: one that replaced it
  const tokens = useLoaded((signal) => get("tokens", { id: manifest.id, sequence }, signal), [manifest.id, manifest.opened, manifest.state, sequence]);
  const ended = useLoaded(async (signal) => (isOpen ? null : gridOf(await get("grid", { ...wanted, first: state.first, last: state.last, span, columns: COLUMNS }, signal))), keys, [state.first, state.last, span]);
  const scores = useLoaded(async (signal) => (isOpen ? null : floats((await get("scores", { ...wanted, layer }, signal)).values)), [...keys, layer]);
  const live = useLive(isOpen ? { ...wanted, opened: manifest.opened, whole: asked.measure === "feature" } : null);
  const grid = useMemo(() => padded(isOpen ? live.grid : ended.value, span), [isOpen, live.grid, ended.value, span]);
  const values = isOpen ? live.grid?.row(layer) ?? null : scores.value;
  const canvas = useRef(null);
  const [hovered, setHovered] = useState(null);
  const ids = tokens.value?.ids ?? [];
  const texts = useMemo(() => tokens.value?.texts ?? (tokens.value?.ids ?? []).map((id) => `‹${id}›`), [tokens.value]);
  useEffect(() => { if (grid) onRanges?.(grid.ranges); }, [grid]);
  const own = shared?.length === grid?.ranges.length ? shared : grid?.ranges;
  const shownGrid = useMemo(() => grid && only(grid, own, rows), [grid, own, state.layers]);
  const ranges = useMemo(() => shownGrid && rangesFor(shownGrid.ranges, scale, each), [shownGrid, scale, each]);
  const range = own ? rangesFor([own[grid.layers.indexOf(layer)] ?? [null, null]], scale, true)[0] : null;
  const position = wholeNumber(state.position);
  const shown = hovered ?? position;
  const zoom = (factor) => {
    const span = Math.max(8, Math.round((grid.last - grid.first + 1) * factor));
    const middle = position ?? Math.round((grid.first + grid.last) / 2);
    const first = Math.max(0, Math.min(middle - Math.floor(span / 2), grid.positions - span));
    change(span >= grid.positions ? { first: "", last: "" } : { first, last: first + span - 1 });
  };
  const isPart = grid && grid.last - grid.first + 1 < grid.positions;
  const pan = (step) => {
    const span = grid.last - grid.first + 1;
    const first = Math.min(Math.max(grid.first + Math.round((step * span) / 2), 0), grid.positions - span);
    change({ first, last: first + span - 1 });
  };
  const describe = (at) => (texts[at] === undefined ? "" : ` “${oneLine(texts[at])}”`);
  return html`
    <section class="panel" aria-label=${`Heat map of ${name}`}>
      <div class="head"><h2>${title(asked)}, layer × position</h2>
        ${ranges && html`<${Legend} range=${ranges[0]} measure=${scale} each=${each} />`}
        ${isOpen && html`<span class="soft small" role="status">Growing while the request generates</span>`}
        ${(ended.isLoading && !isOpen) && html`<span class="soft small" role="status">Computing…</span>`}
        <div class="tools">
          ${isPart && !isOpen && html`<button disabled=${grid.first === 0} onClick=${() => pan(-1)} aria-label="Earlier positions">←</button>
          <button disabled=${grid.last >= grid.positions - 1} onClick=${() => pan(1)} aria-label="Later positions">→</button>`}
          <button disabled=${!grid || isOpen} onClick=${() => zoom(0.5)} aria-label="Zoom in">+</button>
          <button disabled=${!isPart || isOpen} onClick=${() => zoom(2)} aria-label="Zoom out">−</button>
          <button disabled=${!grid} onClick=${() => savePng(`${manifest.id}-${asked.measure}.png`, figureOf(canvas.current, { heading: `${title(asked)} of ${manifest.id}, layer × position`, grid: shownGrid, range: ranges[0], measure: scale, each }))}>PNG</button>
          <button disabled=${!grid} onClick=${() => saveCsv(`${manifest.id}-${asked.measure}.csv`, gridTable(shownGrid))}>CSV</button>
        </div>
      </div>
      <${Problem} error=${isOpen ? live.error : ended.error} />
      ${grid && html`<${HeatMap} grid=${shownGrid} ranges=${ranges} measure=${scale} canvasRef=${canvas} describe=${describe}
        chosen=${position === null ? null : { layer, position }} label=${`${title(asked)} by layer and position. The arrow keys move the chosen cell.`}
        onChoose=${(cell) => change({ layer: cell.layer, position: cell.position })} />`}
    </section>
    <section class="panel" aria-label=${`Text of ${name}`}>
      <div class="head"><h2>Text, coloured by layer ${layer}</h2>
        <${Legend} range=${range} measure=${scale} />
        <span class="status" role="status">${shown === null ? `${texts.length} tokens; the prompt is underlined` : `position ${shown}, token ${ids[shown] ?? "?"} “${oneLine(texts[shown] ?? "")}”: ${number(values?.[shown])}`}</span>
        <div class="tools"><button disabled=${!values} onClick=${() => saveCsv(`${manifest.id}-layer-${layer}.csv`, tokenTable(ids, texts, values, asked.measure))}>CSV</button></div>
      </div>
      <${Problem} error=${tokens.error ?? (isOpen || scores.error?.message === ended.error?.message ? null : scores.error)} />
      ${tokens.value?.why && html`<p class="soft small">${tokens.value.why}</p>`}
      ${tokens.value && html`<${Tokens} texts=${texts} ids=${ids} values=${values} range=${range} measure=${scale} promptTokens=${manifest.prompt_tokens}
        chosen=${position} label=${`Tokens of ${name}`} onHover=${setHovered} onChoose=${(at) => change({ layer, position: at })} />`}
    </section>`;
}

// A grid with some of its layers; with all if none is named. `ranges` are those of the grid's layers.
function only(grid, ranges, rows) {
  const kept = grid.layers.map((layer, index) => index).filter((index) => !rows || rows.includes(grid.layers[index]));
  if (!kept.length || kept.length === grid.layers.length) return { ...grid, ranges };
  const values = new Float32Array(kept.length * grid.columns);
  kept.forEach((index, row) => values.set(grid.values.subarray(index * grid.columns, (index + 1) * grid.columns), row * grid.columns));
  return { ...grid, values, layers: kept.map((index) => grid.layers[index]), ranges: kept.map((index) => ranges[index]) };
}

// A grid with empty columns up to a number of positions, so that two captures side by side are aligned.
function padded(grid, span) {
  const isWhole = grid && grid.columns === grid.positions && grid.last === grid.positions - 1 && grid.first === 0;
  if (!isWhole || span <= grid.positions || span > COLUMNS) return grid;
  const values = new Float32Array(grid.layers.length * span).fill(NaN);
  grid.layers.forEach((_, row) => values.set(grid.values.subarray(row * grid.columns, (row + 1) * grid.columns), row * span));
  return { ...grid, values, columns: span, last: span - 1, positions: span };
}

const gridOf = (answer) => ({ ...answer, values: floats(answer.values) });

function gridTable({ layers, first, last, columns, values }) {
  const at = Array.from({ length: columns }, (_, column) => startOf({ first, last, columns }, column));
  return [["layer", ...at], ...layers.map((layer, index) => [layer, ...values.subarray(index * columns, (index + 1) * columns)])];
}

const tokenTable = (ids, texts, values, measure) => [
  ["position", "token", "text", measure],
  ...Array.from(values, (value, at) => [at, ids[at], texts[at], value]),
];
