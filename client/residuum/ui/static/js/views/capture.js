// One capture: what it is, its heat map and text, and the row that is chosen.
import { html, useState } from "../core/lib.js";
import { get, post } from "../core/api.js";
import { bytes, count, firstPositions, number, oneLine, plain, runs, time } from "../core/format.js";
import { useLoaded, usePoll } from "../core/hooks.js";
import { measureCode } from "../core/python.js";
import { link } from "../core/route.js";
import { Badge, Facts, Problem, Python } from "../parts/basics.js";
import { choices, Controls, Missing, title } from "../parts/choices.js";
import { Pane } from "../parts/pane.js";

export function useCapture(id) {
  const loaded = useLoaded((signal) => get("capture", { id }, signal), [id]);
  const isOpen = loaded.value?.state === "open";
  // A capture that has ended may be labelled, deleted or replaced elsewhere. A load that still runs would be stopped.
  usePoll(async () => loaded.value && !loaded.isLoading && loaded.reload(), isOpen ? 1 : 3, [id, isOpen]);
  return loaded;
}

export const useDirections = () => useLoaded((signal) => get("directions", {}, signal), []);

export function Capture({ state, change, about }) {
  const manifest = useCapture(state.id ?? "");
  const directions = useDirections();
  if (!manifest.value || !directions.value) {
    return html`<h1>Capture ${oneLine(state.id ?? "")}</h1><${Problem} error=${manifest.error ?? directions.error} />${!manifest.error && html`<p class="empty">Loading…</p>`}`;
  }
  const found = manifest.value;
  const chosen = choices(found, state, directions.value);
  const isThere = !chosen.missing.length;
  const code = isThere && measureCode({ chosen, ids: [found.id], about, gallery: directions.value });
  return html`
    <div class="head"><h1>${oneLine(found.id)}</h1><${Badge} kind=${found.state}>${found.state}<//>
      <div class="tools"><a class="button" href=${link("compare", { ...chosen.asked, a: found.id, from: state.from })}>Compare with another</a></div>
    </div>
    <${Problem} error=${manifest.error} />
    ${["incomplete", "aborted"].includes(found.state) && html`<p class="notice">${found.detail || `This capture is ${found.state}.`} ${found.missing}</p>`}
    <${Controls} manifest=${found} chosen=${chosen} gallery=${directions.value} state=${state} change=${change} />
    <div class="columns">
      <div>${isThere ? html`<${Pane} manifest=${found} chosen=${chosen} state=${state} change=${change} name=${found.id} />` : html`<${Missing} chosen=${chosen} />`}</div>
      <aside aria-label="Details">
        ${isThere && html`<${Row} manifest=${found} chosen=${chosen} position=${state.position} change=${change} />`}
        <section class="panel" aria-label="About this capture"><h2>About this capture</h2><${About} manifest=${found} /></section>
        <${Labels} manifest=${found} onChanged=${manifest.reload} />
        <${Delete} id=${found.id} />
      </aside>
    </div>
    ${isThere && html`<${Python} code=${code} />`}`;
}

function Row({ manifest, chosen, position, change }) {
  const { site, sequence, layer, asked } = chosen;
  const isChosen = position !== undefined && position !== "";
  const row = useLoaded(async (signal) => (isChosen ? get("row", { id: manifest.id, site: site.name, sequence, layer, position, ...asked }, signal) : null),
    [manifest.id, manifest.opened, manifest.state, site.name, sequence, layer, position, asked]);
  if (!isChosen) return html`<section class="panel" aria-label="Row"><h2>Row</h2><p class="soft">Choose a cell or a token to see its row.</p></section>`;
  const found = row.value;
  return html`<section class="panel" aria-label="Row"><h2>Row of layer ${layer}, position ${position}</h2>
    <${Problem} error=${row.error} />
    ${found?.missing && html`<p class="soft">${found.missing} The last token of a reply never has one.</p>`}
    ${found && !found.missing && !row.error && html`
      <${Facts} facts=${[
        asked.measure !== "norm" && [title(asked), number(found.measure)],
        ["Norm", number(found.norm)], ["Mean", number(found.mean)], ["Standard deviation", number(found.std)],
        ["Minimum, maximum", `${number(found.min)}, ${number(found.max)}`], ["Elements", `${count(found.width)}${found.not_finite ? `, ${count(found.not_finite)} of them infinite or NaN, which the other numbers leave out` : ""}`],
        manifest.encoding === "sae" ? ["Strongest features", strongest(found.largest, change)] : ["Largest elements", found.largest.slice(0, 5).map(([index, value]) => `${index}: ${number(value)}`).join("; ")],
      ].filter(Boolean)} />
      ${found.lens && html`<h3>Tokens that it predicts (logit lens)</h3>
        <table><tbody>${found.lens.map(([id, text, value]) => html`<tr key=${id}><td class="mono">“${oneLine(text)}”</td><td class="number">${(100 * Math.exp(value)).toFixed(1)}%</td></tr>`)}</tbody></table>`}
      ${found.lens && found.lens_model !== manifest.model && html`<p class="soft small">Unembedded by ${found.lens_model}, which the service has now. The row is of ${manifest.model}.</p>`}
      ${found.lens_error && html`<p class="soft small">No logit lens: ${found.lens_error}</p>`}`}
  </section>`;
}

const strongest = (largest, change) => largest.filter(([, value]) => value > 0).map(([index, value]) => html`<div key=${index}><button class="plain" onClick=${() => change({ measure: "feature", feature: index })}>${index}</button>${number(value)}</div>`);

function About({ manifest }) {
  const operations = (list) => list.map((item) => `${item.operation} at ${item.layers.length === 1 ? "layer" : "layers"} ${runs(item.layers)}${item.scale === undefined ? "" : `, scale ${plain(item.scale)}`}`).join("; ");
  return html`<${Facts} facts=${[
    ["Model", manifest.adapter ? `${manifest.model}, adapter ${manifest.adapter}` : manifest.model],
    ["Opened", time(manifest.opened)], ["Ended", time(manifest.ended)],
    ["Layers", runs(manifest.sites[0].layers)], ["Sites", manifest.sites.map(({ name }) => name).join(", ")],
    ["Prompt", `${count(manifest.prompt_tokens)} tokens`],
    ["Sequences", manifest.state === "open" ? "" : manifest.sequences.map(({ tokens, finish }) => `${count(tokens)} tokens${finish && ` (${finish})`}`).join("; ")],
    ["Rows", `${count(manifest.rows)}, ${bytes(manifest.bytes)}`], ["Encoding", `${manifest.encoding}, ${manifest.dtype}`],
    ["Reduction", manifest.reduction === "none" ? "" : manifest.reduction],
    ["Steering", operations(manifest.steering)],
    ...manifest.changes.map((change) => [`From position ${firstPositions(change.first)}`, operations(change.steering) || "no steering"]),
  ]} />`;
}

function Labels({ manifest, onChanged }) {
  const [text, setText] = useState("");
  const [error, setError] = useState(null);
  const save = async (labels, texts = {}) => {
    try {
      await post("capture/label", { id: manifest.id, labels, texts });
      setError(null);
      setText("");
      onChanged();
    } catch (failure) {
      setError(failure);
    }
  };
  const add = (event) => {
    event.preventDefault();
    const [name, value] = text.split(/=(.*)/s).map((part) => part.trim());
    if (!name || value === undefined) setError(new Error("Write a label as name = value."));
    else save({}, { [name]: value });
  };
  return html`<section class="panel" aria-label="Labels"><h2>Labels</h2>
    <p>${Object.entries(manifest.labels).map(([name, value]) => html`<span key=${name}><span class="tag" title=${`${name}: ${value}`}>${oneLine(`${name}: ${value}`)}</span>
      <button class="plain" aria-label=${`Remove the label ${name}`} onClick=${() => save({ [name]: null })}>×</button></span>`)}
      ${!Object.keys(manifest.labels).length && html`<span class="soft">None</span>`}</p>
    <form class="row" onSubmit=${add}><input class="grow" aria-label="New label" placeholder="name = value" value=${text} onInput=${(event) => setText(event.target.value)} /><button>Add</button></form>
    <${Problem} error=${error} /></section>`;
}

function Delete({ id }) {
  const [isSure, setSure] = useState(false);
  const [error, setError] = useState(null);
  const remove = () => post("capture/delete", { id }).then(() => { location.hash = link("captures"); }, setError);
  return html`<section class="panel" aria-label="Delete">
    ${isSure
      ? html`<p>Delete this capture and its rows permanently?</p><div class="tools"><button class="bad" onClick=${remove}>Delete permanently</button><button onClick=${() => setSure(false)}>Keep it</button></div>`
      : html`<button class="bad" onClick=${() => setSure(true)}>Delete this capture…</button>`}
    <${Problem} error=${error} /></section>`;
}
