// The state of a view is in the URL, after the #: #view?name=value. So every view has a link.
import { useLayoutEffect, useState } from "./lib.js";

const PAUSE = 400; // milliseconds between two changes of the URL. Browsers allow about 100 in 30 seconds.
let waiting = null; // the hash that is to be written
let timer = 0;
let written = -Infinity;
let shown = location.hash; // the hash of the current view. If it differs, a link was followed, and its event comes.

export function parse(hash) {
  const [view, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { view: view || "captures", state: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(view, state = {}) {
  const given = Object.entries(state).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#${view}${query && `?${query}`}`;
}

// The current view, its state, and a function that changes some values of the state in place.
export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useLayoutEffect(() => { // an effect begins later, and would miss a link that is followed at once
    const listen = () => {
      forget();
      shown = location.hash;
      setRoute(parse(shown));
    };
    addEventListener("hashchange", listen);
    if (location.hash !== shown) listen();
    addEventListener("click", write, true); // before a link leads away
    addEventListener("pagehide", write);
    return () => {
      removeEventListener("hashchange", listen);
      removeEventListener("click", write, true);
      removeEventListener("pagehide", write);
    };
  }, []);
  const change = (changes) => {
    if (location.hash !== shown) return;
    const now = parse(waiting ?? location.hash);
    waiting = link(now.view, { ...now.state, ...changes });
    setRoute(parse(waiting));
    const rest = written + PAUSE - performance.now();
    if (rest <= 0) write();
    else if (!timer) timer = setTimeout(write, rest);
  };
  return { ...route, change };
}

// Write the waiting state into the URL.
function write() {
  if (waiting === null) return;
  if (location.hash === shown) {
    history.replaceState(null, "", waiting);
    shown = location.hash;
    written = performance.now();
  }
  forget();
}

function forget() {
  clearTimeout(timer);
  timer = 0;
  waiting = null;
}
