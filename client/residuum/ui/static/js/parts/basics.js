// Small parts that all views share.
import { Component, html, useState } from "../core/lib.js";

export const Problem = ({ error }) => error && html`<p class="problem" role="alert">${error.message ?? String(error)}</p>`;
export const Badge = ({ kind = "", children }) => html`<span class=${`badge ${kind}`}>${children}</span>`;

export const Field = ({ label, children, kind = "" }) => html`<label class=${`field ${kind}`}><span>${label}</span>${children}</label>`;

export function Select({ label, value, options, onChange, kind = "", disabled = false }) {
  return html`<${Field} label=${label} kind=${kind}>
    <select value=${value} disabled=${disabled} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([name, text]) => html`<option key=${name} value=${name} selected=${name === value}>${text}</option>`)}
    </select>
  <//>`;
}

export function Facts({ facts }) {
  const shown = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts">${shown.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

// Its children, or a notice if one of them fails: a link may hold what no view expects. `at`: the link.
export class Failsafe extends Component {
  componentDidCatch(error) {
    console.info(error);
    this.setState({ error, at: this.props.at });
  }

  render({ at, children, home }, { error, at: failedAt }) {
    if (!error || at !== failedAt) return children;
    return html`<h1>This view cannot be shown</h1>
      <p class="notice" role="alert">The page failed with what its address holds: ${error.message}</p>
      <a class="button" href=${home} onClick=${() => this.setState({ error: null })}>Start again</a>`;
  }
}

// The lines of Python that do what a view does, with a button that copies them.
export function Python({ code }) {
  const [note, setNote] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(code);
      setNote("Copied");
    } catch {
      setNote("Select the text and copy it");
    }
    setTimeout(() => setNote(""), 2500);
  };
  return html`<details class="panel">
    <summary>Python that does the same</summary>
    <pre class="code" tabindex="0" aria-label="Python code">${code}</pre>
    <div class="tools"><button onClick=${copy}>Copy as Python</button><span class="soft small" role="status">${note}</span></div>
  </details>`;
}
