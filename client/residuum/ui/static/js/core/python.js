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

export function measureCode({ about, gallery, id, site, sequence, measure, direction, from }) {
  const select = [site !== "resid_post" && `site=${literal(site)}`, sequence && `sequence=${sequence}`].filter(Boolean).join(", ");
  const lines = [
    "import numpy as np",
    connect(about).trimEnd(),
    `acts = client.activations(${literal(id)}, allow_partial=True)${select && `.select(${select})`}`,
  ];
  if (measure === "norm") {
    lines.push("grid = np.linalg.norm(acts.stack(), axis=2)  # [layers, positions]");
  } else {
    const vector = from ? `directions[${from}]` : "directions[layer]";
    const layers = from ? "acts" : "[layer for layer in acts if layer in directions]";
    const divided = measure === "cosine" ? " / np.linalg.norm(acts[layer], axis=1)" : "";
    lines.push(
      `directions = ${loadDirection(direction, gallery)}`,
      "grid = {}  # layer -> [positions]",
      `for layer in ${layers}:`,
      `    grid[layer] = acts[layer] @ ${vector}.values / ${vector}.norm${divided}`,
    );
  }
  return lines.join("\n");
}

export function operationCode(operation) {
  const vector = operation.from ? `${operation.variable}[${operation.from}]` : operation.variable;
  const phase = operation.phase !== "all" ? `, positions=${literal(operation.phase)}` : "";
  const layers = operation.layers && operation.layers !== "all" ? literal(operation.layers) : "";
  const numbers = ["scale", "min", "max", "value"].filter((name) => operation[name] !== undefined && operation[name] !== null);
  const given = numbers.map((name) => `${name}=${operation[name]}`).join(", ");
  if (operation.from) {
    const kind = operation.kind[0].toUpperCase() + operation.kind.slice(1);
    return `[residuum.${kind}(${vector}, layers=${layers || literal("all")}, ${given}${phase})]`;
  }
  return `${vector}.${operation.kind}(${given}${layers && `, layers=${layers}`}${phase})`;
}
