// Two captures side by side, with the same measure, layer and position.
import { html, useEffect, useMemo, useState } from "../core/lib.js";
import { get } from "../core/api.js";
import { oneLine } from "../core/format.js";
import { useLoaded } from "../core/hooks.js";
import { measureCode } from "../core/python.js";
import { link } from "../core/route.js";
import { Badge, Field, Problem, Python } from "../parts/basics.js";
import { choices, Controls, Missing } from "../parts/choices.js";
import { Pane } from "../parts/pane.js";
import { useCapture, useDirections } from "./capture.js";

export function Compare({ state, change, about }) {
  const directions = useDirections();
  if (!state.a || !state.b) return html`<h1>Compare two captures</h1><${Choose} state=${state} change=${change} />`;
  return html`<div class="head"><h1>Compare</h1><div class="tools"><button onClick=${() => change({ b: "" })}>Choose others</button></div></div>
    <${Problem} error=${directions.error} />
    ${directions.value && html`<${Both} state=${state} change=${change} about=${about} gallery=${directions.value} />`}`;
}

function Both({ state, change, about, gallery }) {
  const sides = [useCapture(state.a), useCapture(state.b)];
  const [ranges, setRanges] = useState([null, null]);
  const shared = useMemo(() => (ranges[0]?.length === ranges[1]?.length ? ranges[0]?.map((own, layer) => joined(own, ranges[1][layer])) : undefined), [ranges]);
  const [left, right] = sides.map((side) => side.value);
  if (!left || !right) return html`<${Problem} error=${sides[0].error ?? sides[1].error} />${!(sides[0].error ?? sides[1].error) && html`<p class="empty">Loading…</p>`}`;
  const chosen = choices(left, state, gallery);
  const views = [left, right].map((manifest) => choices(manifest, { ...state, layer: state.layer || String(chosen.layer) }, gallery));
  const isThere = !chosen.missing.length;
  const span = Math.max(...[left, right].map((side) => side.sequences[Math.min(chosen.sequence, side.sequences.length - 1)].tokens));
  const code = isThere && measureCode({ chosen, ids: [state.a, state.b], about, gallery });
  return html`<${Controls} manifest=${left} chosen=${chosen} gallery=${gallery} state=${state} change=${change} />
    <div class="pair">${[left, right].map((manifest, index) => html`<div key=${index}>
      <div class="head"><h2><a href=${link("capture", { ...state, a: "", b: "", id: manifest.id })}>${oneLine(manifest.id)}</a></h2><${Badge} kind=${manifest.state}>${manifest.state}<//></div>
      <${Problem} error=${sides[index].error} />
      ${views[index].missing.length ? html`<${Missing} chosen=${views[index]} />` : html`<${Pane} manifest=${manifest} chosen=${views[index]} state=${state} change=${change} name=${manifest.id} span=${span}
        shared=${shared} onRanges=${(own) => setRanges((before) => before.map((other, at) => (at === index ? own : other)))} />`}
    </div>`)}</div>
    ${isThere && html`<${Python} code=${code} />`}`;
}

function joined([low, high], [otherLow, otherHigh]) {
  if (low === null || otherLow === null) return low === null ? [otherLow, otherHigh] : [low, high];
  return [Math.min(low, otherLow), Math.max(high, otherHigh)];
}

function Choose({ state, change }) {
  const newest = useLoaded((signal) => get("captures", { size: 200 }, signal), []);
  const [ids, setIds] = useState({ a: state.a ?? "", b: state.b ?? "" });
  useEffect(() => setIds({ a: state.a ?? "", b: state.b ?? "" }), [state.a, state.b]);
  const submit = (event) => {
    event.preventDefault();
    change(ids);
  };
  return html`<form class="panel row" onSubmit=${submit}>
    <datalist id="newest">${(newest.value?.captures ?? []).map(({ id }) => html`<option key=${id} value=${id} />`)}</datalist>
    ${["a", "b"].map((side) => html`<${Field} key=${side} label=${side === "a" ? "First capture" : "Second capture"} kind="grow">
      <input list="newest" required value=${ids[side]} onInput=${(event) => setIds({ ...ids, [side]: event.target.value })} /><//>`)}
    <button class="main">Compare</button></form><${Problem} error=${newest.error} />`;
}
