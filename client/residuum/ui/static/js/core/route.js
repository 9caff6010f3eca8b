// The state of a view is in the URL, after the #: #view?name=value. So every view has a link.
import { useEffect, useState } from "./lib.js";

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
  useEffect(() => {
    const listen = () => setRoute(parse(location.hash));
    addEventListener("hashchange", listen);
    return () => removeEventListener("hashchange", listen);
  }, []);
  const change = (changes) => {
    const now = parse(location.hash);
    history.replaceState(null, "", link(now.view, { ...now.state, ...changes }));
    setRoute(parse(location.hash));
  };
  return { ...route, change };
}
