// Dose and response: the prompt with several scales of one operation, as plots and as a table.
import { html, useEffect, useState } from "../core/lib.js";
import { stream } from "../core/api.js";
import { saveCsv } from "../core/download.js";
import { number, numbersOf, oneLine } from "../core/format.js";
import { Field, Problem, Select } from "./basics.js";
import { sent } from "./operations.js";
import { Plot } from "./plot.js";

// `operation`: the one whose scale changes; undefined if no column has one. `body`: the prompt and the sampling.
export function Sweep({ operation, directions, body }) {
  const [form, setForm] = useState({ from: -4, to: 4, steps: 9, layer: "" });
  const [state, setState] = useState({ points: [], total: 0, error: null, asked: null });
  const [control, setControl] = useState(null);
  useEffect(() => () => control?.abort(), [control]);
  if (!operation) return null;
  const layers = directions.find(({ name }) => name === operation.direction)?.layers ?? [];
  const layer = layers.includes(Number(form.layer)) && form.layer !== "" ? Number(form.layer) : (numbersOf(operation.layers) ?? []).find((at) => layers.includes(at)) ?? layers.at(-1);
  const isRunning = state.total > 0 && state.points.length < state.total && !state.error && !control?.signal.aborted;
  const set = (name) => (event) => setForm({ ...form, [name]: event.target.value });
  const run = async (event) => {
    event.preventDefault();
    const steps = Math.max(1, Math.round(Number(form.steps)));
    const scales = Array.from({ length: steps }, (_, index) => rounded(Number(form.from) + ((Number(form.to) - Number(form.from)) * index) / Math.max(steps - 1, 1)));
    const stop = new AbortController();
    setControl(stop);
    setState({ points: [], total: steps, error: null, asked: { direction: operation.direction, layer } }); // the choices may change afterwards
    try {
      const { prompt, messages, sampling } = body;
      await stream("sweep", { body: { prompt, messages, sampling, operation: sent(operation), layer, scales }, signal: stop.signal,
        onEvent: (_, point) => setState((before) => ({ ...before, points: [...before.points, point].sort((left, right) => left.scale - right.scale) })) });
    } catch (error) {
      if (error.name !== "AbortError") setState((before) => ({ ...before, error }));
    }
  };
  const { points, total, asked } = state;
  const curve = (name) => [{ name, points: points.map((point) => [point.scale, point[name]]) }];
  return html`<section class="panel" aria-label="Dose and response"><div class="head"><h2>Dose and response of ${operation.direction}</h2></div>
    <form class="row" onSubmit=${run}>
      <${Field} label="Scale from" kind="narrow"><input type="number" step="any" required value=${form.from} onInput=${set("from")} /><//>
      <${Field} label="Scale to" kind="narrow"><input type="number" step="any" required value=${form.to} onInput=${set("to")} /><//>
      <${Field} label="Steps" kind="narrow"><input type="number" min="2" max="41" required value=${form.steps} onInput=${set("steps")} /><//>
      <${Select} label="Projection at layer" value=${String(layer)} options=${layers.map((at) => [String(at), String(at)])} onChange=${(value) => setForm({ ...form, layer: value })} />
      <button disabled=${isRunning}>Run the sweep</button>
      ${isRunning && html`<button type="button" onClick=${() => { control.abort(); setControl(control); setState({ ...state, total: points.length }); }}>Stop</button>`}
      <button type="button" disabled=${!points.length} onClick=${() => saveCsv("sweep.csv", [["scale", "projection", "tokens", "text"], ...points.map((point) => [point.scale, point.projection, point.tokens, point.text])])}>CSV</button>
    </form>
    ${isRunning && html`<p role="status"><progress max=${total} value=${points.length} aria-label="Scales that are done"></progress> ${points.length} of ${total} scales</p>`}
    <${Problem} error=${state.error} />
    ${points.length > 0 && html`<div class="pair">
        <div><h3>Mean projection of the reply's rows onto ${asked.direction} at layer ${asked.layer}</h3><${Plot} title="Mean projection by scale" xLabel="scale" yLabel="projection" curves=${curve("projection")} /></div>
        <div><h3>Length of the reply</h3><${Plot} title="Length by scale" xLabel="scale" yLabel="tokens" curves=${curve("tokens")} /></div>
      </div>
      <div class="scroller"><table><thead><tr><th class="number" scope="col">Scale</th><th class="number" scope="col">Projection</th><th class="number" scope="col">Tokens</th><th scope="col">Text</th></tr></thead>
        <tbody>${points.map((point) => html`<tr key=${point.scale}><td class="number">${point.scale}</td><td class="number">${number(point.projection)}</td><td class="number">${point.tokens}</td><td class="hit">${oneLine(point.text)}</td></tr>`)}</tbody></table></div>`}
  </section>`;
}

const rounded = (value) => Number(value.toPrecision(6));
