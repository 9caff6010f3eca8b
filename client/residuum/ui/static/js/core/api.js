// Calls of the page's own server. Every failure is a Failure with a message for people.

export class Failure extends Error {
  constructor(message, status = 0, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

const GONE = "The server of this page does not answer. Check that `residuum ui` is still running.";
const BUSY = 10; // milliseconds after which the page rests while it reads events
const listeners = new Set();

// Call `listener` with the status of each answer; 0 if there was none.
export function onAnswer(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export const get = async (path, parameters, signal) => (await call(url(path, parameters), { signal })).json();

export async function post(path, body, signal) {
  return (await call(url(path), { method: "POST", body: JSON.stringify(body), signal })).json();
}

export async function upload(path, parameters, file) {
  return (await call(url(path, parameters), { method: "POST", body: file })).json();
}

// Read server-sent events: `onEvent(name, data)` for each. An event "error" is thrown as a Failure.
export async function stream(path, { parameters, body, onEvent, signal }) {
  const options = body ? { method: "POST", body: JSON.stringify(body), signal } : { signal };
  const response = await call(url(path, parameters), options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  try {
    while (!ended) {
      const { value, done } = await reader.read();
      ended = done;
      rest += value ?? "";
      const blocks = rest.split("\n\n");
      let begun = performance.now();
      rest = blocks.pop();
      for (const block of blocks) {
        const [first, second] = block.split("\n");
        const name = first.slice("event: ".length);
        const data = JSON.parse(second.slice("data: ".length));
        if (name === "error") throw new Failure(data.message, 0, data.kind);
        onEvent(name, data);
        if (performance.now() - begun < BUSY) continue;
        await new Promise((resolve) => setTimeout(resolve)); // the browser draws, and hears the user
        begun = performance.now();
      }
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    report(0);
    throw new Failure("The connection to the server of this page broke off.");
  }
}

export function url(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `api/${path}${query && `?${query}`}`;
}

// The elements of an array that the server sent as base64 of float32.
export function floats(text) {
  const decoded = atob(text);
  const bytes = new Uint8Array(decoded.length);
  for (let at = 0; at < decoded.length; at++) bytes[at] = decoded.charCodeAt(at); // Uint8Array.from takes ten times longer
  return new Float32Array(bytes.buffer);
}

async function call(address, options) {
  let response;
  try {
    response = await fetch(address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    report(0);
    throw new Failure(GONE);
  }
  report(response.status);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const error = answer?.error ?? { message: `The server answered with status ${response.status}.`, kind: "" };
  throw new Failure(error.message, response.status, error.kind);
}

function report(status) {
  for (const listener of listeners) listener(status);
}
