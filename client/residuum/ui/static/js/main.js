// The page: the session, the bar with the views, and the view that the URL names.
import { html, render, useEffect, useRef, useState } from "./core/lib.js";
import { get, onAnswer, post } from "./core/api.js";
import { usePoll } from "./core/hooks.js";
import { link, useRoute } from "./core/route.js";
import { Failsafe, Field, Problem } from "./parts/basics.js";
import { Capture } from "./views/capture.js";
import { Captures } from "./views/captures.js";
import { Compare } from "./views/compare.js";
import { Directions } from "./views/directions.js";
import { Generate } from "./views/generate.js";
import { Health } from "./views/health.js";

const VIEWS = { captures: Captures, capture: Capture, compare: Compare, generate: Generate, directions: Directions, health: Health };
const BAR = [["captures", "Captures"], ["compare", "Compare"], ["generate", "Generate"], ["directions", "Directions"], ["health", "Health"]];

function Page() {
  const [about, setAbout] = useState(null);
  const [error, setError] = useState(null);
  const [needsToken, setNeedsToken] = useState(false);
  const begin = () => get("about").then((found) => { setAbout(found); setNeedsToken(false); setError(null); }, (failure) => (failure.status === 401 ? setNeedsToken(true) : setError(failure)));
  useEffect(() => onAnswer((status) => status === 401 && setNeedsToken(true)), []);
  useEffect(() => { openSession().then(begin, (failure) => { setError(failure); setNeedsToken(true); }); }, []);
  if (needsToken) return html`<${Gate} error=${error} onOpen=${begin} />`;
  if (!about) return html`<main class="gate"><h1>residuum</h1><${Problem} error=${error} />${error && html`<button onClick=${begin}>Try again</button>`}</main>`;
  return html`<${Shell} about=${about} />`;
}

// Trade the token in the URL for a cookie, and take it out of the URL.
async function openSession() {
  const query = new URLSearchParams(location.search);
  const token = query.get("token");
  if (token === null) return;
  history.replaceState(null, "", location.pathname + location.hash);
  await post("session", { token });
}

function Gate({ error, onOpen }) {
  const [token, setToken] = useState("");
  const [failure, setFailure] = useState(error);
  const open = (event) => {
    event.preventDefault();
    const given = token.includes("token=") ? token.split("token=")[1].split(/[&#]/)[0] : token;
    post("session", { token: given.trim() }).then(onOpen, setFailure);
  };
  return html`<main class="gate"><h1>residuum</h1><p>This page needs the token that <code>residuum ui</code> printed. Open the address that it printed, or enter the token here.</p>
    <form class="row" onSubmit=${open}><${Field} label="Token" kind="grow"><input type="password" autocomplete="off" required value=${token} onInput=${(event) => setToken(event.target.value)} /><//><button class="main">Open</button></form>
    <${Problem} error=${failure} /></main>`;
}

function Shell({ about }) {
  const route = useRoute();
  const main = useRef(null);
  const View = VIEWS[route.view] ?? Captures;
  const shown = VIEWS[route.view] ? route.view : "captures";
  useEffect(() => {
    document.title = `${BAR.find(([name]) => name === shown)?.[1] ?? "Capture"}${route.state.id ? ` ${route.state.id}` : ""} · residuum`;
  }, [shown, route.state.id]);
  useEffect(() => { scrollTo(0, 0); }, [shown]);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="bar"><a class="name" href=${link("captures")}>residuum</a>
      <nav aria-label="Views">${BAR.map(([name, text]) => html`<a key=${name} href=${link(name)} aria-current=${name === shown || (name === "captures" && shown === "capture") ? "page" : undefined}>${text}</a>`)}</nav>
      <span class="where">${about.endpoint || about.store} · ${about.version}</span></header>
    <${Outage} />
    <main ref=${main} tabindex="-1"><${Failsafe} at=${link(route.view, route.state)} home=${link(shown === "capture" ? "captures" : shown)}><${View} key=${`${shown} ${route.state.id ?? ""}`} state=${route.state} change=${route.change} about=${about} /><//></main>`;
}

// Says plainly which service does not answer, and takes it back when it does.
function Outage() {
  const [text, setText] = useState("");
  usePoll(async () => {
    try {
      const { inference, stores, problems } = await get("health");
      const away = [["The inference service", inference], ...Object.entries(stores).map(([name, status]) => [`The store ${name}`, status])].filter(([, status]) => status && status !== "SERVING");
      setText(away.length ? away.map(([name, status]) => `${name} ${status === "UNREACHABLE" ? "does not answer" : "is loading or stopping"}.`).join(" ") : problems[0] ?? "");
    } catch (error) {
      setText(error.message);
    }
  }, 3, []);
  return html`<div role="status">${text && html`<div class="banner">${text}</div>`}</div>`;
}

const root = document.getElementById("page");
root.replaceChildren();
render(html`<${Page} />`, root);
