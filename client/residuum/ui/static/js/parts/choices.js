// The choice of site, sequence, measure and layer.
import { html } from "../core/lib.js";
import { numbersOf, oneLine, wholeNumber } from "../core/format.js";
import { Field, Select } from "./basics.js";

const MEASURES = [["norm", "Norm"], ["projection", "Projection onto a direction"], ["cosine", "Cosine with a direction"], ["probe", "Score of a probe"], ["feature", "Feature of an SAE"]];

// What is shown of a capture, from the state of the URL. `gallery`: its directions, probes and saes.
export function choices(manifest, state, gallery) {
  const site = manifest.sites.find((item) => item.name === state.site) ?? manifest.sites[0];
  const sequence = wholeNumber(state.sequence) ?? 0;
  const measure = state.measure || "norm";
  const source = sourceOf(measure, manifest, state, gallery);
  const middle = site.layers.includes(source.layer) ? source.layer : site.layers[Math.floor(site.layers.length / 2)];
  const layer = state.layer ? site.layers.find((item) => item === Number(state.layer)) : middle;
  const asked = { measure, ...source.asked };
  if (measure === "feature" && asked.sae) asked.from = layer === undefined ? "" : String(layer); // an SAE reads the rows of one layer
  const missing = [
    state.site && site.name !== state.site && `The capture has no site ${oneLine(state.site)}.`,
    sequence >= manifest.sequences.length && `The capture has no sequence ${sequence}.`,
    layer === undefined && `The capture has no layer ${oneLine(state.layer ?? "")} at this site.`,
    !MEASURES.some(([name]) => name === measure) && `There is no measure ${oneLine(measure)}.`,
    state.layers?.trim() && !numbersOf(state.layers)?.some((item) => site.layers.includes(item)) && `Heat map layers: ${oneLine(state.layers)} names no layer of the capture. Write layers such as 3, 5-8, or nothing for all.`,
    source.missing,
  ].filter(Boolean);
  const rows = numbersOf(state.layers) ?? source.rows?.(layer) ?? null;
  return { site, sequence, layer, asked, scale: source.scale ?? measure, item: source.item, each: state.each === "1", rows, missing };
}

// What a measure needs besides the rows: the parameters of the server, and what is missing for them.
function sourceOf(measure, manifest, state, { directions, probes, saes }) {
  if (measure === "projection" || measure === "cosine") {
    const item = named(directions, state.direction);
    const from = state.from ?? "";
    const missing = !item ? absent("direction", state.direction) : from && !item.layers.includes(Number(from)) && `The direction ${item.name} has no layer ${oneLine(from)}.`;
    return { item, missing, asked: { direction: item?.name ?? "", from } };
  }
  if (measure === "probe") {
    const item = named(probes, state.probe);
    const output = wholeNumber(state.output) ?? 0;
    const missing = !item ? absent("probe", state.probe) : output >= item.outputs.length && `The probe ${item.name} has no output ${output}.`;
    return { item, missing, layer: item?.layer, rows: () => (state.from === "all" ? null : [item?.layer]), scale: item?.activation ? "probability" : "probe", asked: { probe: item?.name ?? "", output, from: state.from === "all" ? "all" : "" } };
  }
  if (measure === "feature") {
    const item = manifest.encoding === "sae" ? undefined : named(saes, state.sae);
    const missing = state.feature && wholeNumber(state.feature) === null ? `There is no feature ${oneLine(state.feature)}.` : manifest.encoding !== "sae" && !item && `The rows of this capture are no features. ${absent("sparse autoencoder", state.sae)}`;
    return { item, missing, rows: (layer) => (item ? [layer] : null), asked: { feature: wholeNumber(state.feature) ?? manifest.features[0] ?? 0, sae: item?.name ?? "" } };
  }
  return { asked: {} };
}

const named = (items, name) => items.find((item) => !item.problem && (!name || item.name === name));
const absent = (kind, name) => (name ? `There is no ${kind} ${oneLine(name)}.` : kind === "direction" ? "There are no directions yet." : `There is no ${kind} in the gallery: put its file into the folder that Directions names.`);

export function title({ measure, direction, probe, feature, sae }) {
  return { norm: "Norm", projection: `Projection onto ${direction}`, cosine: `Cosine with ${direction}`, probe: `Score of ${probe}`, feature: `Feature ${feature}${sae ? ` of ${sae}` : ""}` }[measure];
}

// Says what a link names and the capture or the gallery does not have. Another choice in its place would mislead.
export const Missing = ({ chosen }) => html`<p class="notice" role="alert">${chosen.missing.join(" ")} Choose another one above.</p>`;

export function Controls({ manifest, chosen, gallery, state, change }) {
  const usable = (items) => items.filter((item) => !item.problem);
  const has = { norm: true, projection: usable(gallery.directions).length, cosine: usable(gallery.directions).length, probe: usable(gallery.probes).length, feature: manifest.encoding === "sae" || gallery.saes.length };
  const { asked, item } = chosen;
  const { measure } = asked;
  const options = (items) => usable(items).map(({ name }) => [name, name]);
  return html`<div class="row panel">
    ${manifest.sites.length > 1 && html`<${Select} label="Site" value=${chosen.site.name} options=${manifest.sites.map(({ name }) => [name, name])} onChange=${(site) => change({ site, layer: "" })} />`}
    ${manifest.sequences.length > 1 && html`<${Select} label="Sequence" value=${String(chosen.sequence)} options=${manifest.sequences.map((_, index) => [String(index), String(index)])} onChange=${(sequence) => change({ sequence })} />`}
    <${Select} label="Measure" value=${measure} options=${MEASURES.filter(([name]) => has[name] || name === measure)} onChange=${(name) => change({ measure: name, from: "", ...(name === "probe" ? { layer: "" } : {}) })} />
    ${["projection", "cosine"].includes(measure) && html`
      <${Select} label="Direction" value=${asked.direction} options=${options(gallery.directions)} onChange=${(name) => change({ direction: name, from: "" })} />
      <${Select} label="Its vector" value=${asked.from} options=${[["", "each layer's own"], ...(item?.layers ?? []).map((layer) => [String(layer), `of layer ${layer}`])]} onChange=${(from) => change({ from })} />`}
    ${measure === "probe" && html`
      <${Select} label="Probe" value=${asked.probe} options=${options(gallery.probes)} onChange=${(name) => change({ probe: name, output: "", from: "", layer: "" })} />
      ${item?.outputs.length > 1 && html`<${Select} label="Output" value=${String(asked.output)} options=${item.outputs.map((name, index) => [String(index), oneLine(name)])} onChange=${(output) => change({ output })} />`}
      <${Select} label="At" value=${asked.from} options=${[["", item ? `its layer, ${item.layer}` : "its layer"], ["all", "all layers"]]} onChange=${(from) => change({ from })} />`}
    ${measure === "feature" && html`
      ${manifest.encoding !== "sae" && html`<${Select} label="Sparse autoencoder" value=${asked.sae} options=${options(gallery.saes)} onChange=${(sae) => change({ sae })} />`}
      ${manifest.features.length
        ? html`<${Select} label="Feature" value=${String(asked.feature)} options=${manifest.features.map((at) => [String(at), String(at)])} onChange=${(feature) => change({ feature })} />`
        : html`<${Field} label="Feature" kind="narrow"><input type="number" min="0" value=${asked.feature} onChange=${(event) => change({ feature: event.target.value })} /><//>`}`}
    <${Field} label="Heat map layers" kind="narrow"><input placeholder="all" value=${state.layers ?? ""} onChange=${(event) => change({ layers: event.target.value })} /><//>
    <${Select} label="Layer of the text" value=${String(chosen.layer)} options=${chosen.site.layers.map((layer) => [String(layer), String(layer)])} onChange=${(layer) => change({ layer })} />
    <${Select} label="Colours" value=${chosen.each ? "1" : ""} options=${[["", "one scale for all layers"], ["1", "a scale for each layer"]]} onChange=${(each) => change({ each })} />
  </div>`;
}
