// Hooks that load data.
import { useCallback, useEffect, useRef, useState } from "./lib.js";

// Load a value and load it again when `keys` change. Answers to earlier keys are dropped, and a value is never returned
// for other keys than its own. It stays while `reload` or a change of `parts` loads it again: they change what is seen of
// it, not what it is. What failed because a service was away is loaded again until it is back.
export function useLoaded(load, keys, parts = []) {
  const name = JSON.stringify(keys);
  const [state, setState] = useState({ name, ...LOADING });
  const [turn, setTurn] = useState(0);
  const reload = useCallback(() => setTurn((before) => before + 1), []);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    setState((before) => ({ ...before, isLoading: true }));
    load(stop.signal).then(
      (value) => stop.signal.aborted || setState({ name, value, error: null, isLoading: false }),
      (error) => {
        if (stop.signal.aborted) return;
        setState((before) => ({ name, value: before.name === name ? before.value : null, error, isLoading: false }));
        if (AWAY.includes(error.status)) timer = setTimeout(reload, AGAIN);
      },
    );
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [name, JSON.stringify(parts), turn]);
  return { ...(state.name === name ? state : LOADING), reload };
}

const AWAY = [0, 503]; // the status of answers that never came, and of services that do not answer
const AGAIN = 3000; // milliseconds
const LOADING = { value: null, error: null, isLoading: true };

// Call a function now and then every so many seconds, while the page is visible.
export function usePoll(task, seconds, keys) {
  const latest = useRef(task);
  latest.current = task;
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    const tick = async () => {
      if (!document.hidden) await latest.current();
      if (!isOver) timer = setTimeout(tick, seconds * 1000);
    };
    tick();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, keys);
}

const kept = new Map();
const users = new Map(); // name -> functions that draw the views with this state again

// State that outlives its view, until the page is loaded again: drafts and replies go on while another view is shown.
export function useKept(name, initial) {
  const [, setTurn] = useState(0);
  useEffect(() => {
    const own = users.get(name) ?? users.set(name, new Set()).get(name);
    own.add(setTurn);
    return () => own.delete(setTurn);
  }, [name]);
  const set = useCallback((change) => {
    const before = kept.get(name) ?? initial;
    kept.set(name, typeof change === "function" ? change(before) : change);
    for (const draw of users.get(name) ?? []) draw((turn) => turn + 1);
  }, [name]);
  return [kept.get(name) ?? initial, set];
}

// The width of an element in CSS pixels, as it changes.
export function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    if (ref.current) observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

// Whether the page is dark, as that changes.
export function useDark() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const listen = () => setDark(query.matches);
    query.addEventListener("change", listen);
    return () => query.removeEventListener("change", listen);
  }, []);
  return dark;
}
