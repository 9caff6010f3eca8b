// A layer × position heat map on a canvas. The top row is the last layer. It is one stop of the keyboard: the arrow keys
// move the chosen cell.
import { html, useEffect, useRef, useState } from "../core/lib.js";
import { color, css, isDark, paint } from "../core/colors.js";
import { number } from "../core/format.js";
import { useDark, useWidth } from "../core/hooks.js";

// grid: { layers, first, last, columns, values (Float32Array [layers, columns]) }. ranges: [low, high] for each layer.
// chosen: { layer, position } or null. describe(position): what a token is. height: about how many pixels it may take.
export function HeatMap({ grid, ranges, measure, chosen, onChoose, describe = () => "", label, canvasRef, height: most = 420 }) {
  const frame = useRef(null);
  const own = useRef(null);
  const canvas = canvasRef ?? own;
  const width = useWidth(frame);
  const dark = useDark();
  const [hovered, setHovered] = useState(null);
  const { layers, first, last, columns } = grid;
  const rowHeight = Math.max(5, Math.min(layers.length < 8 ? 28 : 14, Math.floor(most / Math.max(layers.length, 1))));
  const height = rowHeight * layers.length;

  useEffect(() => {
    if (width && canvas.current) draw(canvas.current, { width, height, grid, ranges, measure, dark, chosen });
  }, [grid, ranges, width, dark, chosen?.layer, chosen?.position]);

  const cellAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * layers.length);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    if (row < 0 || column < 0 || row >= layers.length || column >= columns) return null;
    return { layer: layers[layers.length - 1 - row], position: startOf(grid, column) };
  };
  const move = (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
    if (!step || !layers.length) return;
    event.preventDefault();
    const now = chosen ?? { layer: layers.at(-1), position: first };
    const index = Math.min(Math.max(layers.indexOf(now.layer) + step[0], 0), layers.length - 1);
    const column = Math.min(Math.max(columnOf(grid, now.position) + step[1], 0), columns - 1);
    onChoose?.({ layer: layers[index], position: step[1] ? startOf(grid, column) : now.position });
  };
  const shown = hovered ?? chosen;
  return html`<div class="heat" ref=${frame}>
    <${LayerAxis} layers=${layers} rowHeight=${rowHeight} />
    <canvas ref=${canvas} role="application" aria-roledescription="heat map" tabindex="0" aria-label=${label}
      onMouseMove=${(event) => setHovered(cellAt(event))} onMouseLeave=${() => setHovered(null)}
      onClick=${(event) => { const cell = cellAt(event); if (cell) onChoose?.(cell); }} onKeyDown=${move}></canvas>
    <div class="foot"><span>position ${first}</span><span>${Math.min(last, (grid.positions ?? last + 1) - 1)}</span></div>
    <div class="foot status" aria-live="polite">${shown ? cellText(grid, shown, describe) : "Point at a cell, or move with the arrow keys."}</div>
  </div>`;
}

// The first position of a column, as the server divides positions into columns.
export const startOf = ({ first, last, columns }, column) => first + Math.floor((column * (last - first + 1)) / columns);

// The column that has a position: the last one that starts at it or before it.
export const columnOf = ({ first, last, columns }, position) => Math.ceil(((position - first + 1) * columns) / (last - first + 1)) - 1;

export function valueAt(grid, { layer, position }) {
  const row = grid.layers.indexOf(layer);
  if (row < 0 || position < grid.first || position > grid.last) return NaN;
  return grid.values[row * grid.columns + columnOf(grid, position)];
}

function cellText(grid, cell, describe) {
  const several = grid.columns < grid.last - grid.first + 1 ? "largest near " : "";
  return `layer ${cell.layer}, ${several}position ${cell.position}${describe(cell.position)}: ${number(valueAt(grid, cell))}`;
}

// The layers that have a number beside them, with their rows.
function marked(layers, rowHeight) {
  const every = Math.max(1, Math.ceil(16 / rowHeight));
  return layers.map((layer, index) => [layer, layers.length - 1 - index]).filter(([, row]) => row % every === 0);
}

function LayerAxis({ layers, rowHeight }) {
  return html`<div class="axis" aria-hidden="true">
    ${marked(layers, rowHeight).map(([layer, row]) => html`<span key=${layer} style=${{ top: `${(row + 0.5) * rowHeight}px` }}>${layer}</span>`)}
  </div>`;
}

function draw(canvas, { height, grid, ranges, measure, dark, chosen }) {
  const { layers, columns, values, first, last } = grid;
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  if (!layers.length || !columns) return;
  const image = new ImageData(columns, layers.length);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < layers.length; row++) {
    const source = layers.length - 1 - row;
    paint(pixels.subarray(row * columns, (row + 1) * columns), values.subarray(source * columns, (source + 1) * columns), ranges[source], measure, dark);
  }
  const small = new OffscreenCanvas(columns, layers.length);
  small.getContext("2d").putImageData(image, 0, 0);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  const row = chosen ? layers.indexOf(chosen.layer) : -1;
  if (row >= 0 && chosen.position >= first && chosen.position <= last) {
    const cell = [canvas.width / columns, canvas.height / layers.length];
    const column = columnOf(grid, chosen.position);
    const thick = 2 * scale;
    context.lineWidth = thick;
    context.strokeStyle = dark ? "#fff" : "#111";
    const [left, top] = [column * cell[0] - thick / 2, (layers.length - 1 - row) * cell[1] - thick / 2]; // around the cell
    const [right, bottom] = [left + Math.max(cell[0], 3) + thick, top + cell[1] + thick];
    const inside = (at, end) => Math.min(Math.max(at, thick / 2), end - thick / 2); // also at the edges of the map
    const [x, y] = [inside(left, canvas.width), inside(top, canvas.height)];
    context.strokeRect(x, y, inside(right, canvas.width) - x, inside(bottom, canvas.height) - y);
  }
}

// A picture of the heat map that explains itself: with a heading, the colours of its range, layers and positions.
export function figureOf(canvas, { heading, grid: { layers, first, last }, range, measure, each }) {
  const scale = devicePixelRatio || 1;
  const [left, top, right, bottom] = [40, 46, 14, 24].map((edge) => Math.round(edge * scale));
  const figure = document.createElement("canvas");
  figure.width = canvas.width + left + right;
  figure.height = canvas.height + top + bottom;
  const context = figure.getContext("2d");
  const page = getComputedStyle(document.body);
  const write = (text, x, y, align = "left") => {
    context.fillStyle = page.color;
    context.font = `${12 * scale}px ${page.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = align;
    context.fillText(text, x, y);
    return x + context.measureText(text).width + 6 * scale;
  };
  context.fillStyle = page.backgroundColor;
  context.fillRect(0, 0, figure.width, figure.height);
  context.drawImage(canvas, left, top);
  write(heading, left, 12 * scale);
  const start = Math.round(write(each ? "low" : number(range[0]), left, 32 * scale)); // else the colours blend
  shades(context, measure, isDark(), [start, 28 * scale, 100 * scale, 8 * scale]);
  write(each ? "high, of each layer" : number(range[1]), start + 106 * scale, 32 * scale);
  const rowHeight = canvas.height / layers.length;
  for (const [layer, row] of marked(layers, rowHeight / scale)) write(layer, left - 6 * scale, top + (row + 0.5) * rowHeight, "right");
  write(`position ${first}`, left, figure.height - bottom / 2);
  write(last, figure.width - right, figure.height - bottom / 2, "right");
  return figure;
}

// Draw the colours from the lowest to the highest.
function shades(context, measure, dark, [left, top, width, height]) {
  for (let at = 0; at < 100; at++) {
    context.fillStyle = css(color(measure === "norm" ? 2 ** (at / 99) : at / 99, measure === "norm" ? [1, 2] : [0, 1], measure, dark));
    context.fillRect(left + (at * width) / 100, top, Math.max(width / 100, 1), height);
  }
}

// The colours of a range, with the numbers at its ends.
export function Legend({ range, measure, each }) {
  const canvas = useRef(null);
  const dark = useDark();
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    canvas.current.width = 100;
    canvas.current.height = 1;
    shades(context, measure, dark, [0, 0, 100, 1]);
  }, [measure, dark]);
  return html`<span class="legend">${each ? "low" : number(range?.[0])}<canvas ref=${canvas} aria-hidden="true"></canvas>${each ? "high, of each layer" : number(range?.[1])}</span>`;
}
