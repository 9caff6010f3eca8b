// One column of Generate: its operations, its text as it comes, and the heat map of its rows.
import { html, useEffect, useRef, useState } from "../core/lib.js";
import { post, stream } from "../core/api.js";
import { rangesFor } from "../core/colors.js";
import { plain, visible } from "../core/format.js";
import { useKept } from "../core/hooks.js";
import { link } from "../core/route.js";
import { Badge, Problem } from "./basics.js";
import { HeatMap, Legend } from "./heatmap.js";
import { Operations, sent } from "./operations.js";
import { title } from "./choices.js";

const controls = new Map(); // index -> what ends the running generation; it goes on while another view is shown
const IDLE = { status: "idle", id: "", tokens: [], marks: [], promptTokens: 0, updatable: true, steering: "", error: null, result: null };

// A generation: its state, and functions that start it, stop it and change its steering.
export function useGeneration(index) {
  const [state, setState] = useKept(`reply ${index}`, IDLE);

  // `steering`: what `body` has, in words. The controls may show something else before the reply has ended.
  const start = async (body, steering) => {
    controls.get(index)?.abort();
    const control = new AbortController();
    controls.set(index, control);
    const isCurrent = () => controls.get(index) === control;
    const update = (change) => isCurrent() && setState(change);
    setState({ ...IDLE, status: "running", steering });
    const arrived = [];
    let frame = 0;
    const flush = () => {
      frame = 0;
      const fresh = arrived.splice(0);
      update((before) => ({ ...before, tokens: [...before.tokens, ...fresh] }));
    };
    const onEvent = (name, data) => {
      if (name === "started") update((before) => ({ ...before, id: data.id, promptTokens: data.prompt_tokens, updatable: data.updatable }));
      if (name === "token") arrived.push({ text: data.text, position: data.position });
      if (name === "token" && !frame) frame = requestAnimationFrame(flush);
      if (name === "finished") { flush(); update((before) => ({ ...before, result: data })); }
    };
    try {
      await stream("generate", { body, onEvent, signal: control.signal });
      update((before) => ({ ...before, status: "done" }));
    } catch (error) {
      flush();
      if (error.name !== "AbortError") update((before) => ({ ...before, status: error.kind === "RequestAborted" ? "stopped" : "failed", error: error.kind === "RequestAborted" ? null : error }));
    }
  };
  const stop = async () => {
    try {
      if (state.id) await post("stop", { id: state.id });
      else {
        controls.get(index)?.abort();
        setState((before) => ({ ...before, status: "stopped" }));
      }
    } catch (error) {
      setState((before) => ({ ...before, error }));
    }
  };
  const steer = async (operations, text) => {
    try {
      const { first_positions: [first] } = await post("steer", { id: state.id, operations });
      setState((before) => ({ ...before, marks: [...before.marks, { position: first, text }], error: null }));
    } catch (error) {
      setState((before) => (before.status === "running" ? { ...before, error } : before)); // else it has just ended
    }
  };
  return { state, start, stop, steer };
}

// `measured`: an operation, onto whose direction the heat map projects; undefined for the norm. `live`: the heat map.
export function Column({ column, directions, onChange, generation, capture, measured, live }) {
  const { state, steer } = generation;
  const timer = useRef(0);
  const text = useRef(null);
  const isAtEnd = useRef(true);
  useEffect(() => { if (isAtEnd.current) text.current.scrollTop = text.current.scrollHeight; }, [state.tokens, state.marks]);
  const scrolled = ({ target }) => { isAtEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 30; };
  const isFixed = state.status === "running" && !state.updatable;
  const change = (operations) => {
    onChange({ ...column, operations });
    if (state.status !== "running" || !state.id || isFixed) return;
    clearTimeout(timer.current); // a slider moves through many values
    timer.current = setTimeout(() => steer(operations.map(sent), describe(operations)), 200);
  };
  return html`<section class="panel" aria-label=${column.name}>
    <div class="head"><h2>${column.name}</h2>${state.status !== "idle" && html`<${Badge} kind=${STATUS[state.status]}>${state.status}<//>`}
      <div class="tools">${state.status === "running" && html`<button onClick=${generation.stop}>Stop</button>`}
      ${state.id && capture && html`<a class="button" href=${link("capture", { id: state.id })}>Open capture</a>`}</div></div>
    <div>${column.canSteer && html`<fieldset class="whole" disabled=${isFixed}><${Operations} operations=${column.operations} directions=${directions} onChange=${change} /></fieldset>
      ${isFixed && html`<p class="soft small">A rule of the operator may steer this reply, so its steering cannot change while it runs.</p>`}`}</div>
    <div><div class="text" ref=${text} onScroll=${scrolled} tabindex="0" aria-label=${`Text of ${column.name}`} aria-live="off" role="group">${texts(state)}</div>
      <${Problem} error=${state.error} />
      ${state.steering && html`<p class="soft small">Started with ${state.steering}</p>`}
      ${state.result && html`<p class="soft small">${state.result.tokens} tokens in ${state.result.seconds.toFixed(1)} s; ended by ${REASONS[state.result.reason] ?? state.result.reason}</p>`}</div>
    <div>${capture && state.id && html`<${LiveMap} live=${live} measured=${measured} name=${column.name} />`}</div>
  </section>`;
}

const STATUS = { running: "open", done: "good", stopped: "warn", failed: "bad" };
const REASONS = { length: "the limit of tokens", stop: "the model" };

// The text, with a mark where a change of the steering began to hold. The mark's position is that of the first steered
// row. The token there was chosen before; the next one is the first that the change can affect.
function texts(state) {
  if (state.status === "idle") return html`<span class="soft">The reply appears here.</span>`;
  const parts = [];
  let marks = state.marks;
  let run = "";
  const flush = () => {
    if (run) parts.push(run);
    run = "";
  };
  for (const token of state.tokens) {
    while (marks.length && marks[0].position < token.position) {
      flush();
      parts.push(html`<span class="mark">${marks[0].text} from token ${marks[0].position + 1 - state.promptTokens}</span>`);
      marks = marks.slice(1);
    }
    run += token.text;
  }
  flush();
  for (const mark of marks) parts.push(html`<span class="mark">${mark.text} from token ${mark.position + 1 - state.promptTokens}</span>`);
  return parts.map((part) => (typeof part === "string" ? visible(part).replaceAll("⏎", "") : part));
}

const placesOf = (layers) => (!layers || layers === "all" ? "all layers" : `${/^\d+$/.test(layers) ? "layer" : "layers"} ${layers}`);

export function describe(operations, withLayers = false) {
  if (!operations.length) return "no steering";
  return operations.map((item) => {
    const value = { add: `scale ${plain(item.scale)}`, ablate: `removal ${plain(item.scale)}`, cap: "bounds", replace: `projection ${plain(item.value)}` }[item.kind];
    const layers = withLayers ? ` at ${placesOf(item.layers.trim().toLowerCase())}` : "";
    return `${item.direction} ${value}${layers}`;
  }).join(", ");
}

// What the live heat map of a column shows; null if it has none.
export function mapOf({ state }, capture, measured) {
  if (!capture || !state.id) return null;
  return { id: state.id, measure: measured ? "projection" : "norm", direction: measured?.direction, from: measured?.from };
}

function LiveMap({ live: { grid, error }, measured, name }) {
  const measure = measured ? "projection" : "norm";
  const heading = title({ measure, direction: measured?.direction });
  const [chosen, setChosen] = useState(null);
  if (error) return html`<p class="soft small">No heat map: ${error.message}</p>`;
  if (!grid) return null;
  const ranges = rangesFor(grid.ranges, measure, true);
  return html`<div class="head"><h3>${heading}</h3><${Legend} measure=${measure} each=${true} /></div>
    <${HeatMap} grid=${grid} ranges=${ranges} measure=${measure} height=${260} chosen=${chosen} onChoose=${setChosen} label=${`${heading} of ${name} by layer and position`} />`;
}
