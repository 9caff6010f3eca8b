// A line plot as SVG: at most two curves, with dots that can be chosen.
import { html, useRef } from "../core/lib.js";
import { number } from "../core/format.js";
import { useWidth } from "../core/hooks.js";

const HEIGHT = 220;
const WIDEST = 640;
const EDGE = { left: 52, right: 12, top: 26, bottom: 34 };

// `curves`: [{ name, points: [[x, y], ...] }]. `line`: a y with a dashed line. `bounds`: [low, high] of y.
export function Plot({ title, xLabel, yLabel, curves, line, bounds, chosen, onChoose }) {
  const frame = useRef(null);
  const width = Math.min(useWidth(frame) || WIDEST, WIDEST);
  const points = curves.flatMap((curve) => curve.points).filter(([, y]) => Number.isFinite(y));
  if (!points.length) return html`<div ref=${frame}><p class="empty">There is nothing to plot.</p></div>`;
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = bounds ?? [Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low < 0 ? low - 1 : Math.max(low - 1, 0), high + 1];
  const placeX = (x) => EDGE.left + ((x - left) / (right - left || 1)) * (width - EDGE.left - EDGE.right);
  const placeY = (y) => HEIGHT - EDGE.bottom - ((y - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const ticks = [low, (low + high) / 2, high];
  const steps = [...new Set([left, Math.round((left + right) / 2), right])];
  const best = points.reduce((found, point) => (point[1] > found[1] ? point : found));
  return html`<div ref=${frame}><svg class="plot" width=${width} height=${HEIGHT} viewBox=${`0 0 ${width} ${HEIGHT}`} role="img"
      aria-label=${`${title}. ${xLabel} ${number(left)} to ${number(right)}; the highest value is ${number(best[1])} at ${number(best[0])}.`}>
    ${ticks.map((y) => html`<g key=${`y${y}`}><line class="axis" x1=${EDGE.left} x2=${width - EDGE.right} y1=${placeY(y)} y2=${placeY(y)} />
      <text x=${EDGE.left - 6} y=${placeY(y) + 4} text-anchor="end">${short(y)}</text></g>`)}
    ${steps.map((x) => html`<text key=${`x${x}`} x=${placeX(x)} y=${HEIGHT - EDGE.bottom + 16} text-anchor="middle">${short(x)}</text>`)}
    <text x=${(EDGE.left + width) / 2} y=${HEIGHT - 4} text-anchor="middle">${xLabel}</text>
    <text x="4" y="12">${yLabel}</text>
    ${line !== undefined && html`<line class="chance" x1=${EDGE.left} x2=${width - EDGE.right} y1=${placeY(line)} y2=${placeY(line)} />`}
    ${curves.map((curve, index) => html`<g key=${curve.name}>
      <polyline class=${`curve${index ? " second" : ""}`} points=${curve.points.map(([x, y]) => `${placeX(x)},${placeY(y)}`).join(" ")} />
      ${curve.points.map(([x, y]) => html`<circle key=${x} class=${`dot${index ? " second" : ""}${x === chosen ? " chosen" : ""}`}
        cx=${placeX(x)} cy=${placeY(y)} r=${x === chosen ? 5 : 3} onClick=${onChoose && (() => onChoose(x))}>
        <title>${`${curve.name}: ${short(y)} at ${short(x)}`}</title></circle>`)}
    </g>`)}
  </svg></div>`;
}

const short = (value) => (Number.isInteger(value) ? String(value) : number(value));
