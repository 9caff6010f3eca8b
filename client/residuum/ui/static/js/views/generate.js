// Generate and steer: up to three columns with the same prompt and seed.
import { html, useEffect, useMemo } from "../core/lib.js";
import { useKept } from "../core/hooks.js";
import { connect, literal, loadDirection, operationCode } from "../core/python.js";
import { Field, Problem, Python, Select } from "../parts/basics.js";
import { checked, newOperation, sent } from "../parts/operations.js";
import { useLives } from "../parts/live.js";
import { Column, describe, mapOf, useGeneration } from "../parts/reply.js";
import { Sweep } from "../parts/sweep.js";
import { useDirections } from "./capture.js";

const DEFAULTS = {
  mode: "text", prompt: "When I opened the door, I saw", system: "", max_tokens: 60, temperature: 0, seed: 1, keep: true,
  columns: [{ name: "Unsteered", canSteer: false, operations: [] }],
};

export function Generate({ state, change, about }) {
  const directions = useDirections();
  const [draft, setDraft] = useKept("generate", undefined);
  const given = state.s ?? draft;
  const settings = useMemo(() => settingsOf(given), [given]);
  useEffect(() => { if (state.s) setDraft(state.s); }, [state.s]);
  const set = (changes) => change({ s: JSON.stringify({ ...settings, ...changes }) });
  const generations = [useGeneration(0), useGeneration(1), useGeneration(2)];
  const all = directions.value?.directions ?? [];
  const { columns } = settings;
  const first = columns.flatMap((column) => column.operations)[0]; // all columns show the same measure
  const measured = columns.map((column) => column.operations[0] ?? first);
  const lives = useLives(columns.map((_, index) => mapOf(generations[index], settings.keep, measured[index])));
  const isRunning = generations.some(({ state: { status } }) => status === "running");
  const start = (event) => {
    event?.preventDefault();
    columns.forEach((column, index) => generations[index].start(bodyOf(settings, column), column.operations.length ? describe(column.operations, true) : ""));
  };
  const setColumn = (index, column) => set({ columns: columns.map((item, at) => (at === index ? column : item)) });
  const addColumn = () => {
    const operation = newOperation(all);
    set({ columns: [...columns, { name: columns.length === 1 ? "A" : "B", canSteer: true, operations: operation ? [operation] : [] }] });
  };
  const setNumber = (name) => (event) => event.target.value !== "" && set({ [name]: Number(event.target.value) });
  return html`
    <div class="head"><h1>Generate and steer</h1></div>
    <form class="panel" onSubmit=${start}>
      <div class="row">
        <${Select} label="Prompt is" value=${settings.mode} options=${[["text", "plain text"], ["chat", "a message in a chat"]]} onChange=${(mode) => set({ mode })} />
        ${settings.mode === "chat" && html`<${Field} label="System message" kind="grow"><input value=${settings.system} onInput=${(event) => set({ system: event.target.value })} /><//>`}
      </div>
      <${Field} label=${settings.mode === "chat" ? "Message" : "Prompt"}><textarea rows="3" value=${settings.prompt} onInput=${(event) => set({ prompt: event.target.value })}
        onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && start(event)}></textarea><//>
      <div class="row">
        <${Field} label="Maximum tokens" kind="narrow"><input type="number" min="1" value=${settings.max_tokens} onInput=${setNumber("max_tokens")} /><//>
        <${Field} label="Temperature" kind="narrow"><input type="number" min="0" max="2" step="any" value=${settings.temperature} onInput=${setNumber("temperature")} /><//>
        <${Field} label="Seed" kind="narrow"><input type="number" min="0" value=${settings.seed} onInput=${setNumber("seed")} /><//>
        <label class="check"><input type="checkbox" checked=${settings.keep} onChange=${(event) => set({ keep: event.target.checked })} />Capture all layers</label>
        <button class="main" type="submit">Generate</button>
        ${isRunning && html`<button type="button" onClick=${() => generations.forEach((item) => item.state.status === "running" && item.stop())}>Stop all</button>`}
        ${columns.length < 3 && html`<button type="button" onClick=${addColumn}>Add column ${columns.length === 1 ? "A" : "B"}</button>`}
        ${columns.length > 1 && html`<button type="button" onClick=${() => set({ columns: columns.slice(0, -1) })}>Remove column ${columns.at(-1).name}</button>`}
        <span class="soft small">Ctrl+Enter generates.</span>
      </div>
    </form>
    <${Problem} error=${directions.error} />
    <div class="steer">${columns.map((column, index) => html`<${Column} key=${column.name} column=${column} directions=${all} capture=${settings.keep} measured=${measured[index]} live=${lives[index]}
      generation=${generations[index]} onChange=${(item) => setColumn(index, item)} />`)}</div>
    <${Sweep} operation=${columns.flatMap((column) => column.operations).find(({ kind }) => kind === "add" || kind === "ablate")} directions=${all}
      body=${bodyOf(settings, { name: "sweep", operations: [] })} />
    <${Python} code=${codeOf(settings, columns, about, directions.value?.folder ?? "")} />`;
}

// The settings in the URL. Whatever a link has, the page gets values of the right kind.
function settingsOf(text) {
  let given = {};
  try {
    given = JSON.parse(text || "{}") ?? {};
  } catch {
    // an incomplete link: the defaults hold
  }
  const settings = { ...DEFAULTS };
  for (const [name, value] of Object.entries(DEFAULTS)) if (typeof given[name] === typeof value) settings[name] = given[name];
  if (!Array.isArray(settings.columns) || !settings.columns.every((item) => Array.isArray(item?.operations) && typeof item.name === "string")) settings.columns = DEFAULTS.columns;
  settings.columns = settings.columns.slice(0, 3).map(({ name, canSteer, operations }) => ({ name, canSteer: canSteer === true, operations: operations.map(checked) }));
  return settings;
}

function messagesOf(settings) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return [...system, { role: "user", content: settings.prompt }];
}

function bodyOf(settings, column) {
  return {
    ...(settings.mode === "chat" ? { messages: messagesOf(settings) } : { prompt: settings.prompt }),
    sampling: { max_tokens: settings.max_tokens, temperature: settings.temperature, seed: settings.seed },
    capture: settings.keep ? { layers: "all", labels: { page: "generate", column: column.name } } : null,
    operations: column.operations.map(sent),
  };
}

function codeOf(settings, columns, about, gallery) {
  const prompt = literal(settings.mode === "chat" ? messagesOf(settings) : settings.prompt);
  const names = [...new Set(columns.flatMap((column) => column.operations.map((item) => item.direction)))];
  const variables = new Map(names.map((name, index) => [name, names.length === 1 ? "direction" : `direction_${index + 1}`]));
  const loads = names.map((name) => `${variables.get(name)} = ${loadDirection(name, gallery)}`);
  const calls = columns.map((column) => {
    const steer = column.operations.map((item) => operationCode({ ...sent(item), variable: variables.get(item.direction) })).join(" + ");
    const options = [`max_tokens=${settings.max_tokens}`, `temperature=${settings.temperature}`, `seed=${settings.seed}`];
    if (settings.keep) options.push("capture=residuum.Capture()");
    if (steer) options.push(`steer=${steer}`);
    return `print(client.generate(prompt, ${options.join(", ")}).text)  # ${column.name}`;
  });
  return [connect(about) + loads.join("\n"), `prompt = ${prompt}`, ...calls].join("\n").replace("\n\n\n", "\n\n");
}
