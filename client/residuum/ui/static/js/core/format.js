// Numbers, times and tokens as text.

const WHOLE = new Intl.NumberFormat("en"); // making one takes longer than using it
export const count = (value) => WHOLE.format(value);

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : value.toFixed(3);
}

// A number that a person chose, such as a scale: without zeros at its end.
export const plain = (value) => String(Number(value.toPrecision(6)));

export function time(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "";
  const at = new Date(milliseconds);
  const pad = (part) => String(part).padStart(2, "0");
  const date = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${date} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

// A token's text with its line ends and tabs visible. Direction marks would reorder the text around them.
export function visible(text) {
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥").replace(/[\u0000-\u0008\u000b-\u001f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "�");
}

export const oneLine = (text) => visible(text).replace(/\n/g, "");

// "0, 3-5" for [0, 3, 4, 5].
export function runs(numbers) {
  const parts = [];
  for (const item of numbers) {
    const last = parts.at(-1);
    if (last && item === last[1] + 1) last[1] = item;
    else parts.push([item, item]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

// Where a change of the steering begins: a position for each sequence, or null if the change is not for it.
export function firstPositions(first) {
  if (!first.includes(null)) return first.join(", ");
  return first.flatMap((position, index) => (position === null ? [] : `${position} of sequence ${index}`)).join(", ");
}

// The whole number of at least 0 that a text is; null if it is none.
export const wholeNumber = (text) => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);

// The numbers in a text such as "0, 3-5"; null if it is empty or no such text.
export function numbersOf(text) {
  if (!/^\s*\d+\s*(-\s*\d+\s*)?(,\s*\d+\s*(-\s*\d+\s*)?)*$/.test(text ?? "")) return null;
  return text.split(",").flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return Array.from({ length: Math.min(Math.max(last - first + 1, 0), 10000) }, (_, index) => first + index);
  });
}
