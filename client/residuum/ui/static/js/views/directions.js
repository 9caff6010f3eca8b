// Directions: the gallery, new ones from prompts or files, how well they separate, and what projects on them.
import { html, useEffect, useState } from "../core/lib.js";
import { get, post, stream, upload, url } from "../core/api.js";
import { saveCsv } from "../core/download.js";
import { number, oneLine, runs } from "../core/format.js";
import { useKept, useLoaded } from "../core/hooks.js";
import { connect, literal, loadDirection, makeCode } from "../core/python.js";
import { link } from "../core/route.js";
import { Facts, Field, Problem, Python, Select } from "../parts/basics.js";
import { Plot } from "../parts/plot.js";
import { useDirections } from "./capture.js";

export function Directions({ state, change, about }) {
  const list = useDirections();
  const directions = list.value?.directions ?? [];
  const chosen = directions.find(({ name }) => name === state.name);
  const probe = (list.value?.probes ?? []).find(({ name }) => name === state.probe);
  const show = (changes) => {
    list.reload();
    change({ new: "", layer: "", ...changes });
  };
  const made = (name, kind) => show(kind === "probe" ? { probe: name } : { name });
  const isNew = state.new === "1" || (list.value && !directions.length && !probe);
  return html`<div class="head"><h1>Directions</h1><span class="soft small">${list.value?.folder ?? ""}</span></div>
    <${Problem} error=${list.error} />
    <div class="split">
      <nav class="panel" aria-label="Gallery"><ul class="list">
        ${directions.map(({ name, layers, problem }) => html`<li key=${name}><a href=${link("directions", { name })} aria-current=${!isNew && name === state.name ? "true" : undefined}>
          ${name}<br /><span class="small soft">${problem ? "cannot be read" : `${layers.length} ${layers.length === 1 ? "layer" : "layers"}`}</span></a></li>`)}
        ${(list.value?.probes ?? []).map(({ name, layer, problem }) => html`<li key=${`probe ${name}`}><a href=${link("directions", { probe: name })} aria-current=${!isNew && name === state.probe ? "true" : undefined}>
          ${name}<br /><span class="small soft">${problem ? "probe, cannot be read" : `probe of layer ${layer}`}</span></a></li>`)}
        ${(list.value?.saes ?? []).map(({ name }) => html`<li key=${`sae ${name}`} class="entry">${name}<br /><span class="small soft">sparse autoencoder</span></li>`)}
        <li><a href=${link("directions", { new: "1" })} aria-current=${isNew ? "true" : undefined}>New direction…</a></li>
      </ul></nav>
      <div>${isNew
        ? html`<${Make} onMade=${made} about=${about} /><${Upload} onMade=${made} />`
        : chosen ? html`<${Direction} key=${chosen.name} entry=${chosen} state=${state} change=${change} about=${about} folder=${list.value.folder} onChanged=${made} />`
        : probe ? html`<${Probe} key=${probe.name} probe=${probe} about=${about} folder=${list.value.folder} onChanged=${(name) => show({ probe: name })} />`
        : list.value && html`<p class="empty">${state.name ? `There is no direction ${oneLine(state.name)}.` : "Choose a direction or a probe, or make a direction."}</p>`}</div>
    </div>`;
}

function Make({ onMade, about }) {
  const [form, setForm] = useKept("new direction", { name: "", positive: "", negative: "", method: "difference_of_means", positions: "last_prompt", chat: "" });
  const [progress, setProgress] = useState(null);
  const [error, setError] = useState(null);
  const [control, setControl] = useState(null);
  useEffect(() => () => control?.abort(), [control]);
  const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
  const set = (name) => (event) => setForm({ ...form, [name]: event.target?.value ?? event });
  const make = async (event) => {
    event.preventDefault();
    const stop = new AbortController();
    setControl(stop);
    setError(null);
    setProgress({ done: 0, total: 1 });
    const body = { ...form, chat: form.chat === "1", positive: lines(form.positive), negative: lines(form.negative) };
    try {
      await stream("direction/make", { body, signal: stop.signal, onEvent: (name, data) => (name === "progress" ? setProgress(data) : onMade(data.name)) });
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure);
    }
    setProgress(null);
  };
  const given = { positive: lines(form.positive), negative: lines(form.negative) };
  return html`<form class="panel" onSubmit=${make} aria-label="New direction from prompts">
    <h2>From two lists of prompts</h2>
    <p class="soft small">The direction of a layer points from the mean of the second list to that of the first. Give one prompt in each line.</p>
    <div class="pair">
      <${Field} label=${`More of this (${given.positive.length} prompts)`}><textarea rows="7" required value=${form.positive} onInput=${set("positive")}></textarea><//>
      <${Field} label=${`Less of this (${given.negative.length} prompts)`}><textarea rows="7" required value=${form.negative} onInput=${set("negative")}></textarea><//>
    </div>
    <div class="row">
      <${Field} label="Name" kind="grow"><input required maxlength="80" value=${form.name} onInput=${set("name")} /><//>
      <${Select} label="Method" value=${form.method} options=${[["difference_of_means", "difference of means"], ["pca", "principal component"]]} onChange=${set("method")} />
      <${Select} label="Rows of" value=${form.positions} options=${[["last_prompt", "the last token"], ["prompt", "all tokens, as a mean"]]} onChange=${set("positions")} />
      <${Select} label="Prompts are" value=${form.chat} options=${[["", "plain text"], ["1", "messages in a chat"]]} onChange=${set("chat")} />
      <button class="main" disabled=${progress !== null}>Make the direction</button>
      ${progress && html`<button type="button" onClick=${() => control.abort()}>Stop</button>`}
    </div>
    ${progress && html`<p role="status"><progress max=${progress.total} value=${progress.done} aria-label="Prompts that are done"></progress> ${progress.done} of ${progress.total} prompts</p>`}
    <${Problem} error=${error} />
  </form><${Python} code=${makeCode({ form, given, about })} />`;
}

function Upload({ onMade }) {
  const [form, setForm] = useState({ name: "", layer: "", file: null });
  const [error, setError] = useState(null);
  const send = async (event) => {
    event.preventDefault();
    try {
      const { name, kind } = await upload("direction/upload", { name: form.name, layer: form.layer, file: form.file.name }, form.file);
      onMade(name, kind);
    } catch (failure) {
      setError(failure);
    }
  };
  const choose = (event) => {
    const file = event.target.files[0] ?? null;
    setForm({ ...form, file, name: form.name || (file?.name.replace(/\.\w+$/, "") ?? "") });
  };
  return html`<form class="panel" onSubmit=${send} aria-label="New direction from a file"><h2>From a file</h2>
    <p class="soft small">A file of Directions.save or Probe.save, a GGUF control vector, or one vector as .npy or .safetensors. For a sparse autoencoder, put its file or folder into the folder above.</p>
    <div class="row">
      <${Field} label="File"><input type="file" required accept=".safetensors,.gguf,.npy" onChange=${choose} /><//>
      <${Field} label="Name" kind="grow"><input required maxlength="80" value=${form.name} onInput=${(event) => setForm({ ...form, name: event.target.value })} /><//>
      <${Field} label="Layer, if one vector" kind="narrow"><input type="number" min="0" value=${form.layer} onInput=${(event) => setForm({ ...form, layer: event.target.value })} /><//>
      <button>Add to the gallery</button>
    </div><${Problem} error=${error} /></form>`;
}

function Direction({ entry, state, change, about, folder, onChanged }) {
  const { name } = entry;
  const found = useLoaded((signal) => (entry.problem ? Promise.reject(new Error(entry.problem)) : get("direction", { name }, signal)), [name]);
  const facts = found.value;
  const best = facts?.notes.separation && bestLayer(facts.notes.separation);
  const layer = entry.layers.includes(Number(state.layer)) && state.layer ? Number(state.layer) : best ?? entry.layers[Math.floor(entry.layers.length / 2)];
  const choose = (at) => change({ layer: at });
  return html`
    <section class="panel" aria-label="Direction"><div class="head"><h2>${name}</h2>
      ${!entry.problem && html`<div class="tools">
        <a class="button" href=${url("direction/file", { name })} download>safetensors</a>
        <a class="button" href=${url("direction/file", { name, format: "gguf" })} download>GGUF</a>
        <a class="button" href=${link("generate", { s: JSON.stringify({ columns: [{ name: "Unsteered", canSteer: false, operations: [] }, { name: "A", canSteer: true, operations: [{ kind: "add", direction: name, layers: String(layer), from: "", scale: 1, min: null, max: 1, value: 0, phase: "all" }] }] }) })}>Steer with it</a>
      </div>`}</div>
      <${Problem} error=${found.error} />
      ${facts && html`<${Facts} facts=${[
        ["Layers", runs(facts.layers)], ["Elements", facts.hidden_size], ["Method", facts.origin.method.replaceAll("_", " ")], ["Model", facts.origin.model],
        ["Site", facts.origin.site], ["Rows of", facts.origin.positions.replaceAll("_", " ")],
        ["Examples", facts.origin.positive_examples ? `${facts.origin.positive_examples} + ${facts.origin.negative_examples}` : ""],
      ]} />`}
    </section>
    ${facts && html`<div class="pair">
      ${facts.notes.separation && html`<section class="panel" aria-label="Separation"><h2>Separation of held-out examples with a difference of means</h2>
        <${Plot} title="Separation by layer" xLabel="layer" yLabel="area under ROC" bounds=${[Math.min(0.4, ...facts.notes.separation.areas), 1]} line=${0.5} chosen=${layer} onChoose=${choose}
          curves=${[{ name: "separation", points: facts.notes.separation.layers.map((at, index) => [at, facts.notes.separation.areas[index]]) }]} />
        <div class="tools"><span class="soft small">1: each example of the first list projects further than each of the second. 0.5: chance.</span>
          <button onClick=${() => saveCsv(`${name}-separation.csv`, [["layer", "area"], ...facts.notes.separation.layers.map((at, index) => [at, facts.notes.separation.areas[index]])])}>CSV</button></div>
      </section>`}
      <section class="panel" aria-label="Norms"><h2>Norm of each layer's vector</h2>
        <${Plot} title="Norm by layer" xLabel="layer" yLabel="norm" chosen=${layer} onChoose=${choose} curves=${[{ name: "norm", points: facts.layers.map((at, index) => [at, facts.norms[index]]) }]} /></section></div>
      <${Promoted} name=${name} layer=${layer} layers=${facts.layers} onChoose=${choose} />
      <${Search} name=${name} site=${facts.origin.site} layer=${layer} state=${state} change=${change} about=${about} folder=${folder} />`}
    <${Manage} name=${name} onChanged=${onChanged} />`;
}

function Probe({ probe, about, folder, onChanged }) {
  const { name, problem } = probe;
  const code = `${connect(about)}probe = residuum.Probe.load(${literal(`${folder}/${name}.safetensors`)})\nfor delta in client.stream("Once upon a time", probes=[probe], max_tokens=8):\n    print(delta.text, delta.scores)`;
  return html`<section class="panel" aria-label="Probe"><div class="head"><h2>${name}</h2></div>
      <${Problem} error=${problem && new Error(problem)} />
      ${!problem && html`<${Facts} facts=${[["Kind", probe.attention ? "attention probe" : probe.mlp ? `probe, an MLP of ${probe.mlp + 1} layers` : "linear probe"], ["Layer", probe.layer], ["Site", probe.site], ["Elements", probe.width],
        ["Outputs", probe.outputs.length > 1 ? probe.outputs.map(oneLine).join(", ") : "1"], ["Activation", probe.activation ?? "none"]]} />
      <p class="soft small">${probe.attention ? html`Captures do not show its scores, because each depends on all rows before. Use the code below, or score the rows of a capture in Python.`
        : html`Open a capture and choose the measure <em>Score of a probe</em> to see what it reads.`}</p>`}
    </section>${!problem && html`<${Python} code=${code} />`}<${Manage} name=${name} onChanged=${onChanged} />`;
}

// Often many layers separate the examples equally well. The first ones of these say little of what the text means.
function bestLayer({ layers, areas }) {
  const best = layers.filter((_, index) => areas[index] === Math.max(...areas));
  return best[Math.floor(best.length / 2)];
}

function Promoted({ name, layer, layers, onChoose }) {
  const found = useLoaded((signal) => get("direction/tokens", { name, layer }, signal), [name, layer]);
  return html`<section class="panel" aria-label="Tokens it promotes"><div class="head"><h2>Tokens that it promotes</h2>
      <div class="tools"><${Select} label="Layer" value=${String(layer)} options=${layers.map((at) => [String(at), String(at)])} onChange=${onChoose} /></div></div>
    ${found.error && html`<p class="soft small">Not known: ${found.error.message}</p>`}
    ${found.value && html`<${Facts} facts=${[["More of it", tags(found.value.more)], ["Less of it", tags(found.value.less)]]} />`}</section>`;
}

const tags = (texts) => texts.map((text, index) => html`<span class="tag mono" key=${index}>${oneLine(text)}</span>`);

function Search({ name, site, layer, state, change, about, folder }) {
  const [result, setResult] = useKept(`search ${name}`, { value: null, error: null, isLoading: false });
  const order = state.order || "most";
  const measure = state.by || "projection";
  const where = state.where ?? "";
  const positions = state.start === "1" ? "" : "1:";
  const asked = { layer, order, measure, where, positions };
  const search = async (event) => {
    event.preventDefault();
    setResult({ asked, value: null, error: null, isLoading: true });
    try {
      setResult({ asked, value: await post("search", { direction: name, ...asked, k: 100 }), error: null, isLoading: false });
    } catch (error) {
      setResult({ asked, value: null, error, isLoading: false });
    }
  };
  // Tokens of another layer or measure would stand below a title that is not theirs.
  const value = JSON.stringify(result.asked) === JSON.stringify(asked) ? result.value : null;
  const hits = value?.hits ?? [];
  const code = `${connect(about)}direction = ${loadDirection(name, folder)}\nunit = direction[${layer}].values / direction[${layer}].norm\nprint(client.search(unit, layer=${layer}, k=100${site === "resid_post" ? "" : `, site=${literal(site)}`}, measure=${literal(measure)}, order=${literal(order)}${where && `, where=${literal(where)}`}${positions && `, positions=${literal(positions)}`}))`;
  return html`<section class="panel" aria-label="Search"><div class="head"><h2>Tokens in the stores that project most on layer ${layer}</h2></div>
    <form class="row" onSubmit=${search}>
      <${Select} label="Order" value=${order} options=${[["most", "most"], ["least", "least"], ["absolute", "largest absolute value"]]} onChange=${(value) => change({ order: value })} />
      <${Select} label="Measure" value=${measure} options=${[["projection", "projection"], ["cosine", "cosine"]]} onChange=${(value) => change({ by: value })} />
      <${Field} label="Label filter" kind="grow"><input value=${where} onInput=${(event) => change({ where: event.target.value })} /><//>
      <label class="check"><input type="checkbox" checked=${Boolean(positions)} onChange=${(event) => change({ start: event.target.checked ? "" : "1" })} />Leave out the first token</label>
      <button class="main" disabled=${result.isLoading}>${result.isLoading ? "Searching…" : "Search"}</button>
      <button type="button" disabled=${!hits.length} onClick=${() => saveCsv(`${name}-search.csv`, [["score", "capture", "sequence", "position", "before", "token", "after"], ...hits.map((hit) => [hit.score, hit.id, hit.sequence, hit.position, hit.before, hit.token, hit.after])])}>CSV</button>
    </form>
    <${Problem} error=${result.error} />
    ${value && html`<p class="soft small" role="status">${hits.length} tokens of ${value.summary}</p>
      <div class="scroller hits" tabindex="0" role="region" aria-label="Tokens that were found"><table><thead><tr><th class="number" scope="col">Score</th><th scope="col">Text</th><th scope="col">Capture</th></tr></thead><tbody>
        ${hits.map((hit) => html`<tr key=${`${hit.id} ${hit.sequence} ${hit.position}`}><td class="number">${number(hit.score)}</td>
          <td class="hit">${oneLine(hit.before)}<mark>${hit.token === null ? `‹${hit.token_id ?? "?"}›` : oneLine(hit.token)}</mark>${oneLine(hit.after)}</td>
          <td><a href=${link("capture", { id: hit.id, site: site === "resid_post" ? "" : site, sequence: hit.sequence || "", position: hit.position, layer, measure, direction: name })}>${oneLine(hit.id)}, ${hit.position}</a></td></tr>`)}
      </tbody></table></div>`}
    </section><${Python} code=${code} />`;
}

function Manage({ name, onChanged }) {
  const [to, setTo] = useState(name);
  const [isSure, setSure] = useState(false);
  const [error, setError] = useState(null);
  const call = (path, body, next) => post(path, body).then(() => onChanged(next), setError);
  const rename = (event) => {
    event.preventDefault();
    call("direction/rename", { name, to }, to);
  };
  return html`<section class="panel" aria-label="Rename or delete"><form class="row" onSubmit=${rename}>
      <${Field} label="Name" kind="grow"><input required maxlength="80" value=${to} onInput=${(event) => setTo(event.target.value)} /><//>
      <button disabled=${to === name}>Rename</button>
      ${isSure ? html`<button type="button" class="bad" onClick=${() => call("direction/delete", { name }, "")}>Delete permanently</button><button type="button" onClick=${() => setSure(false)}>Keep it</button>`
        : html`<button type="button" class="bad" onClick=${() => setSure(true)}>Delete…</button>`}
    </form><${Problem} error=${error} /></section>`;
}
