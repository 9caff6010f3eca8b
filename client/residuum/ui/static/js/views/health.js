// Health: what `residuum doctor` says, the stores' space, and what runs.
import { html, useState } from "../core/lib.js";
import { get } from "../core/api.js";
import { bytes, count } from "../core/format.js";
import { useLoaded, usePoll } from "../core/hooks.js";
import { connect } from "../core/python.js";
import { link } from "../core/route.js";
import { Badge, Facts, Problem, Python } from "../parts/basics.js";
import { Plot } from "../parts/plot.js";

const MOST_SPEEDS = 60; // polls, 3 seconds apart

export function Health({ about }) {
  const [health, setHealth] = useState({ value: null, error: null, speeds: [] });
  const model = useLoaded((signal) => get("model", {}, signal), []);
  const doctor = useLoaded((signal) => get("doctor", {}, signal), []);
  usePoll(async () => {
    try {
      const value = await get("health");
      setHealth((before) => ({ value, error: null, speeds: withSpeed(before, value.load) }));
    } catch (error) {
      setHealth((before) => ({ ...before, value: null, error }));
    }
  }, 3, []);
  const found = health.value;
  return html`<div class="head"><h1>Health</h1></div>
    <${Problem} error=${health.error} />
    <div class="pair">
      <section class="panel" aria-label="Inference service"><div class="head"><h2>Inference service</h2>${found?.inference && html`<${Status} status=${found.inference} />`}</div>
        <${Problem} error=${model.error} />
        <${Facts} facts=${[["Address", about.endpoint || "none: stores alone"], ...(model.value ? [["Model", model.value.model], ["Layers", model.value.layers], ["Hidden size", model.value.hidden_size],
          ["Sites", model.value.sites.join(", ")], ["Longest request", `${count(model.value.max_model_len)} tokens`], ["Versions", `residuum ${model.value.version}, vLLM ${model.value.vllm}`]] : [])]} />
      </section>
      ${found?.load && html`<${Load} load=${found.load} speeds=${health.speeds} />`}
      ${(found?.stats ?? []).map((item) => html`<${Store} key=${item.endpoint} item=${item} status=${found.stores[item.endpoint]} />`)}
    </div>
    ${found?.problems.map((text) => html`<p class="problem" key=${text}>${text}</p>`)}
    <section class="panel" aria-label="Checks"><div class="head"><h2>Checks of <code>residuum doctor</code></h2>
      <div class="tools"><button disabled=${doctor.isLoading} onClick=${doctor.reload}>${doctor.isLoading ? "Checking…" : "Check again"}</button></div></div>
      <${Problem} error=${doctor.error} />
      ${doctor.value?.findings.map((item, index) => html`<div class="finding" key=${index}>
        <span><${Badge} kind=${item.ok ? (item.warning ? "warn" : "good") : "bad"}>${item.ok ? (item.warning ? "warning" : "ok") : "failed"}<//></span><span>${item.check}</span><span class="soft">${item.detail}</span></div>`)}
    </section>
    <${Python} code=${`${connect(about)}print(client.health())\nprint(client.info())\nfor store in client.stats():\n    print(store)`} />`;
}

// How fast the counts of the service grew since the poll before, in a list of the last few minutes.
function withSpeed({ value, speeds }, load) {
  const before = value?.load;
  if (!before || !load || load.at <= before.at || load.generated_tokens < before.generated_tokens) return speeds; // the first poll, or the service started again
  const per = (name) => (load[name] - before[name]) / (load.at - before.at);
  return [...speeds, { at: load.at, prompt: per("prompt_tokens"), generated: per("generated_tokens"), bytes: per("acknowledged_bytes") }].slice(-MOST_SPEEDS);
}

function Load({ load, speeds }) {
  const now = speeds.at(-1);
  const curve = (name) => [{ name, points: speeds.map((speed) => [Math.round(speed.at - now.at), speed[name]]) }];
  return html`<section class="panel" aria-label="Load"><div class="head"><h2>Load</h2></div>
    <${Facts} facts=${[
      ["Requests running", `${count(load.running_requests)}; the engine runs up to ${count(load.max_running_requests)} at once`],
      ["Captures open", count(load.open_captures)],
      ["Ring", html`<progress max=${load.ring_bytes} value=${load.ring_used_bytes} aria-label="Filled part of the ring"></progress> ${bytes(load.ring_used_bytes)} of ${bytes(load.ring_bytes)}`],
      ["Waits for the ring", load.ring_wait_seconds ? `${load.ring_wait_seconds.toFixed(1)} s since the start` : "none"],
      ["Losses", load.ring_losses ? html`<span class="lost">${count(load.ring_losses)} since the start</span>` : "none"],
      ["Throughput", now ? `${now.generated.toFixed(1)} generated and ${now.prompt.toFixed(1)} prompt tokens/s` : "measuring…"],
      ["Rows to the stores", now ? `${bytes(Math.round(now.bytes))}/s` : "measuring…"],
    ]} />
    ${speeds.length > 1 && html`<${Plot} title="Generated tokens per second" xLabel="seconds" yLabel="generated tokens/s" bounds=${[0, Math.max(1, ...speeds.map(({ generated }) => generated))]} curves=${curve("generated")} />`}
  </section>`;
}

const Status = ({ status }) => html`<${Badge} kind=${status === "SERVING" ? "good" : "bad"}>${status === "SERVING" ? "serving" : status.toLowerCase().replaceAll("_", " ")}<//>`;

function Store({ item, status }) {
  const states = Object.entries(item.captures).filter(([, number]) => number).map(([name, number]) => `${count(number)} ${name}`).join(", ");
  const open = item.captures.open ?? 0;
  return html`<section class="panel" aria-label=${`Store ${item.store || item.endpoint}`}><div class="head"><h2>Store ${item.store && item.store !== item.endpoint ? item.store : ""}</h2>${status && html`<${Status} status=${status} />`}</div>
    ${item.why_full && html`<p class="problem">The store is full: ${item.why_full}</p>`}
    <${Facts} facts=${[["Address", item.endpoint], ["Captures", states || "none"], ["Being written", open ? html`<a href=${link("captures", { states: "open" })}>${count(open)}</a>` : "none"],
      ["Rows", bytes(item.num_bytes)],
      ...(item.append_limit_bytes ? [["In use", html`<progress max=${item.append_limit_bytes} value=${item.used_bytes} aria-label="Space in use"></progress> ${bytes(item.used_bytes)} of ${bytes(item.append_limit_bytes)}`], ["Free on the disk", bytes(item.free_disk_bytes)]] : []),
      ["Version", item.server_version]]} /></section>`;
}
