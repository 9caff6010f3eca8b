// "Copy as Python": lines of client code that do what a view does.

// A text as a Python literal. JSON's escapes are Python's, too, but for the names of constants.
export function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}

export function connect({ endpoint, store }) {
  const given = [endpoint && literal(endpoint), store && `store=${literal(store)}`].filter(Boolean).join(", ");
  return `import residuum\n\nclient = residuum.Client(${given})\n`;
}

export const loadDirection = (name, gallery) => `residuum.Directions.load(${literal(`${gallery}/${name}.safetensors`)})`;

const promptsOf = (form, prompts) => (form.chat === "1" ? prompts.map((content) => [{ role: "user", content }]) : prompts);

// A direction from two lists of prompts.
export const makeCode = ({ form, given, about }) => `${connect(about)}
what = residuum.Capture(layers="all", positions=${literal(form.positions)})
positive = client.generate_many(${literal(promptsOf(form, given.positive))}, max_tokens=0, capture=what)
negative = client.generate_many(${literal(promptsOf(form, given.negative))}, max_tokens=0, capture=what)
direction = residuum.directions.${form.method}(client.activations(positive), client.activations(negative), positions=${literal(form.positions)})
direction.save(${literal(`${form.name || "direction"}.safetensors`)})`;

// The values that a view shows, of one capture or of several with the same choices.
export function measureCode({ chosen, ids, about, gallery }) {
  const { site, sequence, asked } = chosen;
  const select = [site.name !== "resid_post" && `site=${literal(site.name)}`, sequence && `sequence=${sequence}`].filter(Boolean).join(", ");
  const { setup, value, layers } = valueCode(chosen, gallery);
  const grid = asked.measure === "norm"
    ? "grid = np.linalg.norm(acts.stack(), axis=2)  # [layers, positions]"
    : `grid = {layer: ${value} for layer in ${layers}}  # layer -> [positions]`;
  const parts = ids.map((id) => `acts = client.activations(${literal(id)}, allow_partial=True)${select && `.select(${select})`}\n${grid}`);
  return ["import numpy as np", connect(about).trimEnd(), ...setup, ...parts].join("\n");
}

function valueCode({ asked, item }, { folder, saes }) {
  if (asked.measure === "norm") return { setup: [] };
  if (asked.measure === "probe") {
    const output = item.outputs.length > 1 ? `[:, ${asked.output}]` : "";
    const setup = [`probe = residuum.Probe.load(${literal(`${folder}/${asked.probe}.safetensors`)})`];
    return { setup, value: `probe.score(acts[layer])${output}`, layers: asked.from ? "acts" : "[probe.layer]" };
  }
  if (asked.measure === "feature") {
    if (!asked.sae) return { setup: [], value: `acts[layer][:, ${asked.feature}]`, layers: "acts" };
    const setup = [`sae = residuum.sae.load(${literal(saes.find(({ name }) => name === asked.sae).path)})`];
    return { setup, value: `sae.encode(acts[layer])[:, ${asked.feature}]`, layers: `[${asked.from}]` };
  }
  const vector = asked.from ? `directions[${asked.from}]` : "directions[layer]";
  const divided = asked.measure === "cosine" ? " / np.linalg.norm(acts[layer], axis=1)" : "";
  const setup = [`directions = ${loadDirection(asked.direction, folder)}`];
  return { setup, value: `acts[layer] @ ${vector}.values / ${vector}.norm${divided}`, layers: asked.from ? "acts" : "[layer for layer in acts if layer in directions]" };
}

export function operationCode(operation) {
  const vector = operation.from ? `${operation.variable}[${operation.from}]` : operation.variable;
  const phase = operation.phase !== "all" ? `, positions=${literal(operation.phase)}` : "";
  const layers = operation.layers && operation.layers !== "all" ? literal(operation.layers) : "";
  const numbers = ["scale", "min", "max", "value"].filter((name) => operation[name] !== undefined && operation[name] !== null);
  const given = numbers.map((name) => `${name}=${operation[name]}`).join(", ");
  if (operation.from) {
    const kind = operation.kind[0].toUpperCase() + operation.kind.slice(1);
    return `[residuum.${kind}(${vector}, layers=${layers || literal("all")}, ${given}${phase}, site=${operation.variable}.steering_site)]`;
  }
  return `${vector}.${operation.kind}(${given}${layers && `, layers=${layers}`}${phase})`;
}
