// The editor of steering operations.
import { html } from "../core/lib.js";
import { link } from "../core/route.js";
import { Field, Select } from "./basics.js";

const KINDS = [["add", "Add"], ["ablate", "Remove (ablate)"], ["cap", "Keep within bounds (cap)"], ["replace", "Set the projection (replace)"]];
const PHASES = [["all", "prompt and reply"], ["prompt", "prompt"], ["generated", "reply"]];

const EMPTY = { kind: "add", direction: "", layers: "all", from: "", scale: 1, min: null, max: 1, value: 0, phase: "all" };

// An operation with values of the right kind, whatever a link has.
export function checked(given) {
  const operation = { ...EMPTY };
  for (const [name, value] of Object.entries(EMPTY)) {
    const isFine = ["min", "max"].includes(name) ? given?.[name] === null || typeof given?.[name] === "number" : typeof given?.[name] === typeof value;
    if (isFine) operation[name] = given[name];
  }
  if (!KINDS.some(([kind]) => kind === operation.kind)) operation.kind = EMPTY.kind;
  if (!PHASES.some(([phase]) => phase === operation.phase)) operation.phase = EMPTY.phase;
  return operation;
}

export function newOperation(directions) {
  const first = directions.find((item) => !item.problem && item.layers.length);
  if (!first) return null;
  return { ...EMPTY, direction: first.name, layers: String(first.layers[Math.floor(first.layers.length / 2)]) };
}

export function Operations({ operations, directions, onChange }) {
  const usable = directions.filter((item) => !item.problem);
  const change = (index, changes) => onChange(operations.map((item, at) => (at === index ? { ...item, ...changes } : item)));
  return html`${operations.map((item, index) => html`<fieldset class="operation" key=${index}>
      <legend class="small soft">Operation ${index + 1}</legend>
      <div class="row">
        <${Select} label="What" value=${item.kind} options=${KINDS} onChange=${(kind) => change(index, { kind })} />
        <${Select} label="Direction" value=${item.direction} options=${usable.map(({ name }) => [name, name])} onChange=${(direction) => change(index, { direction, from: "" })} />
        <${Field} label="Layers" kind="narrow"><input placeholder="12-14, or all" value=${item.layers} onChange=${(event) => change(index, { layers: event.target.value })} /><//>
        <${Select} label="Vector" value=${item.from} onChange=${(from) => change(index, { from })}
          options=${[["", "each layer's own"], ...(usable.find(({ name }) => name === item.direction)?.layers ?? []).map((layer) => [String(layer), `of layer ${layer}`])]} />
        <${Select} label="Where" value=${item.phase} options=${PHASES} onChange=${(phase) => change(index, { phase })} />
      </div>
      ${["add", "ablate"].includes(item.kind) && html`<${Slider} label="Scale" value=${item.scale} bound=${item.kind === "add" ? 10 : 2} onChange=${(scale) => change(index, { scale })} />`}
      ${item.kind === "replace" && html`<${Slider} label="Projection" value=${item.value} bound=${50} onChange=${(value) => change(index, { value })} />`}
      ${item.kind === "cap" && html`<div class="row">${["min", "max"].map((bound) => html`<${Field} key=${bound} label=${bound === "min" ? "Lower bound" : "Upper bound"} kind="narrow">
        <input type="number" step="any" value=${item[bound] ?? ""} onChange=${(event) => change(index, { [bound]: event.target.value === "" ? null : Number(event.target.value) })} /><//>`)}</div>`}
      <button class="plain bad" onClick=${() => onChange(operations.filter((_, at) => at !== index))}>Remove operation ${index + 1}</button>
    </fieldset>`)}
    <button disabled=${!usable.length} onClick=${() => onChange([...operations, newOperation(directions)])}>Add an operation</button>
    ${!usable.length && html`<span class="small"> <a href=${link("directions", { new: "1" })}>Make a direction first.</a></span>`}`;
}

function Slider({ label, value, bound, onChange }) {
  const set = (event) => event.target.value !== "" && onChange(Number(event.target.value));
  return html`<div class="slider"><span class="small soft">${label}</span>
    <input type="range" aria-label=${`${label}, slider`} min=${-bound} max=${bound} step=${bound / 100} value=${value} onInput=${set} />
    <input type="number" aria-label=${label} step="any" value=${value} onInput=${set} /></div>`;
}

// What the server takes: only the numbers of the operation's kind.
export function sent(operation) {
  const { kind, direction, layers, from, phase } = operation;
  const numbers = { add: ["scale"], ablate: ["scale"], cap: ["min", "max"], replace: ["value"] }[kind];
  return { kind, direction, layers, from, phase, ...Object.fromEntries(numbers.map((name) => [name, operation[name]])) };
}
