// All captures as a table: search, filters, sort, live states. Only the visible rows are in the page.
import { html, useEffect, useMemo, useRef, useState } from "../core/lib.js";
import { get } from "../core/api.js";
import { saveCsv } from "../core/download.js";
import { bytes, count, oneLine, time } from "../core/format.js";
import { usePoll } from "../core/hooks.js";
import { connect, literal } from "../core/python.js";
import { link } from "../core/route.js";
import { Badge, Field, Problem, Python, Select } from "../parts/basics.js";

const ROW = 34;
const PAGE = 1000;
const MOST = 100000;
const NEWEST = 100;
const WHOLE_SECONDS = 60; // after which the whole list is loaded again, without what was deleted elsewhere
const MOST_SINGLE = 20; // captures to ask for one by one; if more have ended, the whole list is loaded again
const COLUMNS = [
  ["id", "Capture", "", (item) => item.id],
  ["state", "State", "state", (item) => item.state],
  ["opened", "Opened", "time", (item) => item.opened ?? 0],
  ["rows", "Rows", "count", (item) => item.rows],
  ["bytes", "Size", "count", (item) => item.bytes],
  ["labels", "Labels", "labels", (item) => labelText(item.labels)],
];
const STATES = [["", "All states"], ["open", "Open"], ["complete", "Complete"], ["incomplete", "Incomplete"], ["aborted", "Aborted"]];

export function Captures({ state, change, about }) {
  const { text = "", states = "", where = "", sort = "opened", order = "down" } = state;
  const list = useCaptures(states, where);
  const [picked, setPicked] = useState([]);
  const shown = useMemo(() => sorted(list.items.filter((item) => matches(item, text)), sort, order), [list.items, text, sort, order]);
  const pick = (id) => setPicked((before) => (before.includes(id) ? before.filter((item) => item !== id) : [...before, id].slice(-2)));
  const sortBy = (name) => change({ sort: name, order: name === sort && order === "down" ? "up" : "down" });
  return html`
    <div class="head"><h1>Captures</h1>
      <span class="soft" role="status">${list.isLoading ? `Loading, ${count(list.items.length)} so far…` : `${count(shown.length)} of ${count(list.items.length)}`}${list.isCut ? `, the newest: there are more than ${count(MOST)}. Use the filters.` : ""}</span>
      <div class="tools">
        <a class="button" aria-disabled=${picked.length !== 2} href=${picked.length === 2 ? link("compare", { a: picked[0], b: picked[1] }) : undefined}>
          Compare ${picked.length === 2 ? "the two" : "two: choose them"}</a>
        <button onClick=${() => saveCsv("captures.csv", table(shown))}>CSV</button>
        <button onClick=${list.reload}>Reload</button>
      </div>
    </div>
    <div class="row panel">
      <${Field} label="Search in IDs and labels" kind="grow"><input type="search" value=${text} onInput=${(event) => change({ text: event.target.value })} /><//>
      <${Select} label="State" value=${states} options=${STATES} onChange=${(value) => change({ states: value })} />
      <${Where} value=${where} onChange=${(value) => change({ where: value })} />
    </div>
    <${Problem} error=${list.error} />
    <${Table} items=${shown} sort=${sort} order=${order} sortBy=${sortBy} picked=${picked} pick=${pick} isLoading=${list.isLoading || list.error} hasFilter=${Boolean(text || states || where)} />
    <${Python} code=${`${connect(about)}for item in client.captures(${[states && `states=${literal(states)}`, where && `where=${literal(where)}`].filter(Boolean).join(", ")}):\n    print(item.capture_id, item.state, item.num_rows, dict(item.labels))`} />`;
}

function Where({ value, onChange }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  return html`<${Field} label="Label filter, such as split = train" kind="grow">
    <input value=${text} onInput=${(event) => setText(event.target.value)} onChange=${(event) => onChange(event.target.value)}
      onKeyDown=${(event) => event.key === "Enter" && onChange(event.target.value)} />
  <//>`;
}

function Table({ items, sort, order, sortBy, picked, pick, isLoading, hasFilter }) {
  const frame = useRef(null);
  const [first, setFirst] = useState(0);
  const visibleRows = Math.ceil((frame.current?.clientHeight ?? 800) / ROW) + 12;
  const start = Math.max(0, Math.min(first, items.length - visibleRows));
  const rows = items.slice(start, start + visibleRows);
  useEffect(() => {
    frame.current.scrollTop = 0;
    setFirst(0);
  }, [sort, order]);
  const scroll = (event) => setFirst(Math.max(0, 4 * Math.floor((event.target.scrollTop / ROW - 4) / 4)));
  return html`<div class="captures scroller" ref=${frame} onScroll=${scroll} tabindex="0" role="region" aria-label="Table of captures">
    <table aria-rowcount=${items.length + 1}>
      <thead><tr>
        <th class="pick" scope="col"><span class="small soft">Pick</span></th>
        ${COLUMNS.map(([name, text, kind]) => html`<th key=${name} class=${`${kind}${kind === "count" ? " number" : ""}`} scope="col"
          aria-sort=${name === sort ? (order === "down" ? "descending" : "ascending") : "none"}>
          <button onClick=${() => sortBy(name)}>${text}${name === sort ? (order === "down" ? " ↓" : " ↑") : ""}</button></th>`)}
      </tr></thead>
      <tbody>
        ${start > 0 && html`<tr class="spacer" aria-hidden="true"><td colspan="7" style=${{ height: `${start * ROW}px` }}></td></tr>`}
        ${rows.map((item, index) => html`<tr key=${item.id} aria-rowindex=${start + index + 2}>
          <td class="pick"><input type="checkbox" aria-label=${`Pick ${item.id} to compare`} checked=${picked.includes(item.id)} onChange=${() => pick(item.id)} /></td>
          <td><a href=${link("capture", { id: item.id })}>${oneLine(item.id)}</a></td>
          <td class="state"><${Badge} kind=${item.state}>${item.state}<//></td>
          <td class="time">${time(item.opened)}</td>
          <td class="count number">${count(item.rows)}</td>
          <td class="count number">${bytes(item.bytes)}</td>
          <td class="labels">${Object.entries(item.labels).map(([name, value]) => html`<span class="tag" key=${name} title=${`${name}: ${value}`}>${oneLine(`${name}: ${value}`)}</span>`)}</td>
        </tr>`)}
        ${start + rows.length < items.length && html`<tr class="spacer" aria-hidden="true"><td colspan="7" style=${{ height: `${(items.length - start - rows.length) * ROW}px` }}></td></tr>`}
      </tbody>
    </table>
    ${!items.length && !isLoading && html`<p class="empty">${hasFilter ? "No capture matches." : html`There are no captures yet. <a href=${link("generate")}>Generate text</a> and keep its rows.`}</p>`}
  </div>`;
}

// All captures of a filter, page by page; then the newest and the open ones again every few seconds.
function useCaptures(states, where) {
  const [items, setItems] = useState([]);
  const [status, setStatus] = useState({ isLoading: true, error: null });
  const [turn, setTurn] = useState(0);
  const known = useRef(new Map());
  const loaded = useRef(0);
  useEffect(() => {
    const stop = new AbortController();
    known.current = new Map();
    setStatus({ isLoading: true, error: null });
    loadAll({ states, where }, stop.signal, (page) => {
      for (const item of page) known.current.set(item.id, item);
      setItems([...known.current.values()]);
    }).then(
      (isCut) => {
        loaded.current = Date.now();
        setStatus({ isLoading: false, error: null, isCut });
      },
      (error) => stop.signal.aborted || setStatus({ isLoading: false, error }),
    );
    return () => stop.abort();
  }, [states, where, turn]);
  usePoll(async () => {
    if (status.isLoading) return;
    const before = known.current; // another filter has another map
    try {
      const isOld = Date.now() - loaded.current > WHOLE_SECONDS * 1000;
      const found = isOld ? await whole({ states, where }) : { items: await refreshed(before, states, where), isCut: status.isCut };
      if (known.current !== before) return;
      if (isOld) loaded.current = Date.now();
      known.current = found.items;
      setItems([...known.current.values()]);
      setStatus({ isLoading: false, error: null, isCut: found.isCut });
    } catch (error) {
      if (known.current === before) setStatus({ ...status, error });
    }
  }, 3, [states, where, status.isLoading]);
  return { items, ...status, reload: () => setTurn((before) => before + 1) };
}

// The list with new captures, and with the state of those that were open.
async function refreshed(before, states, where) {
  const open = [...before.values()].filter((item) => item.state === "open");
  const newest = (await get("captures", { states, where, size: NEWEST })).captures;
  // More came than the newest page has. Those in between would be missing.
  if (newest.length === NEWEST && !before.has(newest.at(-1).id)) return (await whole({ states, where })).items;
  const stillOpen = open.length ? (await get("captures", { states: "open", where, size: PAGE })).captures : [];
  const found = new Set([...newest, ...stillOpen].map((item) => item.id));
  const ended = open.filter((item) => !found.has(item.id));
  if (ended.length > MOST_SINGLE) return (await whole({ states, where })).items;
  const after = new Map([...newest.filter((item) => !before.has(item.id)).map((item) => [item.id, item]), ...before]);
  for (const item of [...newest, ...stillOpen]) if (after.has(item.id)) after.set(item.id, item);
  // Captures in the span of the newest page that it does not have were deleted.
  const oldest = newest.length < NEWEST ? -1 : newest.at(-1).opened;
  for (const item of before.values()) if (item.opened > oldest && !found.has(item.id) && item.state !== "open") after.delete(item.id);
  for (const item of ended) {
    const now = await current(item);
    if (now && (!states || now.state === states)) after.set(item.id, now);
    else after.delete(item.id);
  }
  return after;
}

// A capture's entry as it is now; null if it was deleted.
async function current(item) {
  try {
    const { state, rows, bytes: size, ended, labels } = await get("capture", { id: item.id });
    return { ...item, state, rows, bytes: size, ended, labels };
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

async function whole(filter) {
  const items = new Map();
  const isCut = await loadAll(filter, null, (page) => page.forEach((item) => items.set(item.id, item)));
  return { items, isCut };
}

// Load all pages; the result says whether there were more captures than the page lists.
async function loadAll(filter, signal, onPage) {
  let page = "";
  let total = 0;
  do {
    const answer = await get("captures", { ...filter, size: PAGE, page }, signal);
    if (signal?.aborted) return false;
    total += answer.captures.length;
    onPage(answer.captures);
    page = answer.next;
  } while (page && total < MOST);
  return Boolean(page);
}

const labelText = (labels) => Object.entries(labels).map(([name, value]) => `${name}: ${value}`).join(" ");

function matches(item, text) {
  const wanted = text.trim().toLowerCase();
  return !wanted || `${item.id} ${labelText(item.labels)}`.toLowerCase().includes(wanted);
}

function sorted(items, sort, order) {
  const [, , , key] = COLUMNS.find(([name]) => name === sort) ?? COLUMNS[2];
  const sign = order === "up" ? 1 : -1;
  const keyed = items.map((item) => [key(item), item]);
  keyed.sort(([left], [right]) => (left < right ? -sign : left > right ? sign : 0));
  return keyed.map(([, item]) => item);
}

const table = (items) => [
  ["capture", "state", "opened", "rows", "bytes", "labels"],
  ...items.map((item) => [item.id, item.state, time(item.opened), item.rows, item.bytes, labelText(item.labels)]),
];
