// One capture: its heat map and its tokens, with the choice of site, sequence, measure and layer.
import { html, useEffect, useMemo, useRef, useState } from "../core/lib.js";
import { floats, get } from "../core/api.js";
import { rangesFor } from "../core/colors.js";
import { saveCsv, savePng } from "../core/download.js";
import { number, numbersOf, oneLine, wholeNumber } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { Field, Problem, Select } from "./basics.js";
import { HeatMap, Legend, startOf } from "./heatmap.js";
import { useLive } from "./live.js";
import { Tokens } from "./tokens.js";

const MEASURES = [["norm", "Norm"], ["projection", "Projection onto a direction"], ["cosine", "Cosine with a direction"]];
const COLUMNS = 1024;

// The choices that a capture and the directions allow, from the state of the URL.
export function choices(manifest, state, directions) {
  const site = manifest.sites.find((item) => item.name === state.site) ?? manifest.sites[0];
  const sequence = Math.min(wholeNumber(state.sequence) ?? 0, manifest.sequences.length - 1);
  const layer = state.layer ? site.layers.find((item) => item === Number(state.layer)) : site.layers[Math.floor(site.layers.length / 2)];
  const measure = state.measure || "norm";
  const isNorm = measure === "norm";
  const direction = isNorm ? undefined : directions.find((item) => !item.problem && (!state.direction || item.name === state.direction));
  const from = isNorm ? "" : state.from ?? "";
  const missing = [
    state.site && site.name !== state.site && `The capture has no site ${oneLine(state.site)}.`,
    layer === undefined && `The capture has no layer ${oneLine(state.layer ?? "")} at this site.`,
    !MEASURES.some(([name]) => name === measure) && `There is no measure ${oneLine(measure)}.`,
    !isNorm && !direction && (state.direction ? `There is no direction ${oneLine(state.direction)}.` : "There are no directions yet."),
    direction && from && !direction.layers.includes(Number(from)) && `The direction ${direction.name} has no layer ${oneLine(from)}.`,
  ].filter(Boolean);
  return { site, sequence, layer, measure, direction: direction?.name ?? "", from, each: state.each === "1", rows: numbersOf(state.layers), missing };
}

// Says what a link names and the capture or the gallery does not have. Another choice in its place would mislead.
export const Missing = ({ chosen }) => html`<p class="notice" role="alert">${chosen.missing.join(" ")} Choose another one above.</p>`;

export function Controls({ manifest, chosen, directions, state, change }) {
  const usable = directions.filter((item) => !item.problem);
  const direction = usable.find((item) => item.name === chosen.direction);
  return html`<div class="row panel">
    ${manifest.sites.length > 1 && html`<${Select} label="Site" value=${chosen.site.name} options=${manifest.sites.map(({ name }) => [name, name])} onChange=${(site) => change({ site, layer: "" })} />`}
    ${manifest.sequences.length > 1 && html`<${Select} label="Sequence" value=${String(chosen.sequence)} options=${manifest.sequences.map((_, index) => [String(index), String(index)])} onChange=${(sequence) => change({ sequence })} />`}
    <${Select} label="Measure" value=${chosen.measure} options=${usable.length ? MEASURES : [["norm", "Norm (no directions yet)"]]} onChange=${(measure) => change({ measure })} />
    ${chosen.measure !== "norm" && html`
      <${Select} label="Direction" value=${chosen.direction} options=${usable.map(({ name }) => [name, name])} onChange=${(name) => change({ direction: name, from: "" })} />
      <${Select} label="Its vector" value=${chosen.from} options=${[["", "each layer's own"], ...(direction?.layers ?? []).map((layer) => [String(layer), `of layer ${layer}`])]} onChange=${(from) => change({ from })} />`}
    <${Field} label="Heat map layers" kind="narrow"><input placeholder="all" value=${state.layers ?? ""} onChange=${(event) => change({ layers: event.target.value })} /><//>
    <${Select} label="Layer of the text" value=${String(chosen.layer)} options=${chosen.site.layers.map((layer) => [String(layer), String(layer)])} onChange=${(layer) => change({ layer })} />
    <${Select} label="Colours" value=${chosen.each ? "1" : ""} options=${[["", "one scale for all layers"], ["1", "a scale for each layer"]]} onChange=${(each) => change({ each })} />
  </div>`;
}

// `state` has the window (first, last) and the chosen position; `change` changes them. `span`: positions to show at least.
// `shared` and `onRanges`: two panes have the same colours; each says its own ranges, and gets those of both.
export function Pane({ manifest, chosen, state, change, name, span = 0, shared, onRanges }) {
  const { site, sequence, layer, measure, direction, from, each, rows } = chosen;
  const wanted = { id: manifest.id, site: site.name, sequence, measure, direction, from };
  const isOpen = manifest.state === "open";
  const keys = [manifest.id, manifest.state, site.name, sequence, measure, direction, from];
  const tokens = useLoaded((signal) => get("tokens", { id: manifest.id, sequence }, signal), [manifest.id, manifest.state, sequence]);
  const ended = useLoaded(async (signal) => (isOpen ? null : gridOf(await get("grid", { ...wanted, first: state.first, last: state.last, columns: COLUMNS }, signal))), keys, [state.first, state.last]);
  const scores = useLoaded(async (signal) => (isOpen ? null : floats((await get("scores", { ...wanted, layer }, signal)).values)), [...keys, layer]);
  const live = useLive(isOpen ? wanted : null);
  const grid = useMemo(() => padded(isOpen ? live.grid : ended.value, span), [isOpen, live.grid, ended.value, span]);
  const values = isOpen ? live.grid?.row(layer) ?? null : scores.value;
  const canvas = useRef(null);
  const [hovered, setHovered] = useState(null);
  const ids = tokens.value?.ids ?? [];
  const texts = useMemo(() => tokens.value?.texts ?? (tokens.value?.ids ?? []).map((id) => `‹${id}›`), [tokens.value]);
  useEffect(() => { if (grid) onRanges?.(grid.ranges); }, [grid]);
  const own = shared?.length === grid?.ranges.length ? shared : grid?.ranges;
  const shownGrid = useMemo(() => grid && only(grid, own, rows), [grid, own, state.layers]);
  const ranges = useMemo(() => shownGrid && rangesFor(shownGrid.ranges, measure, each), [shownGrid, measure, each]);
  const range = own ? rangesFor([own[site.layers.indexOf(layer)]], measure, true)[0] : null;
  const position = wholeNumber(state.position);
  const shown = hovered ?? position;
  const zoom = (factor) => {
    const span = Math.max(8, Math.round((grid.last - grid.first + 1) * factor));
    const middle = position ?? Math.round((grid.first + grid.last) / 2);
    const first = Math.max(0, Math.min(middle - Math.floor(span / 2), grid.positions - span));
    change(span >= grid.positions ? { first: "", last: "" } : { first, last: first + span - 1 });
  };
  const describe = (at) => (texts[at] === undefined ? "" : ` “${oneLine(texts[at])}”`);
  return html`
    <section class="panel" aria-label=${`Heat map of ${name}`}>
      <div class="head"><h2>${title(measure, direction)}, layer × position</h2>
        ${ranges && html`<${Legend} range=${ranges[0]} measure=${measure} each=${each} />`}
        ${isOpen && html`<span class="soft small" role="status">Growing while the request generates</span>`}
        ${(ended.isLoading && !isOpen) && html`<span class="soft small" role="status">Computing…</span>`}
        <div class="tools">
          <button disabled=${!grid || isOpen} onClick=${() => zoom(0.5)} aria-label="Zoom in">+</button>
          <button disabled=${!grid || isOpen || grid.columns === grid.positions} onClick=${() => zoom(2)} aria-label="Zoom out">−</button>
          <button disabled=${!grid} onClick=${() => savePng(`${manifest.id}-${measure}.png`, canvas.current)}>PNG</button>
          <button disabled=${!grid} onClick=${() => saveCsv(`${manifest.id}-${measure}.csv`, gridTable(shownGrid))}>CSV</button>
        </div>
      </div>
      <${Problem} error=${isOpen ? live.error : ended.error} />
      ${grid && html`<${HeatMap} grid=${shownGrid} ranges=${ranges} measure=${measure} canvasRef=${canvas} describe=${describe}
        chosen=${position === null ? null : { layer, position }} label=${`${title(measure, direction)} by layer and position. The arrow keys move the chosen cell.`}
        onChoose=${(cell) => change({ layer: cell.layer, position: cell.position })} />`}
    </section>
    <section class="panel" aria-label=${`Text of ${name}`}>
      <div class="head"><h2>Text, coloured by layer ${layer}</h2>
        <span class="status" role="status">${shown === null ? `${texts.length} tokens; the prompt is underlined` : `position ${shown}, token ${ids[shown] ?? "?"} “${oneLine(texts[shown] ?? "")}”: ${number(values?.[shown])}`}</span>
        <div class="tools"><button disabled=${!values} onClick=${() => saveCsv(`${manifest.id}-layer-${layer}.csv`, tokenTable(ids, texts, values, measure))}>CSV</button></div>
      </div>
      <${Problem} error=${tokens.error ?? (isOpen ? null : scores.error)} />
      ${tokens.value?.why && html`<p class="soft small">${tokens.value.why}</p>`}
      ${tokens.value && html`<${Tokens} texts=${texts} ids=${ids} values=${values} range=${range} measure=${measure} promptTokens=${manifest.prompt_tokens}
        chosen=${position} label=${`Tokens of ${name}`} onHover=${setHovered} onChoose=${(at) => change({ layer, position: at })} />`}
    </section>`;
}

export const title = (measure, direction) => (measure === "norm" ? "Norm" : `${measure === "cosine" ? "Cosine with" : "Projection onto"} ${direction}`);

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
