// The tokens of a sequence as text, each on the colour of its value. Only blocks near the visible part are in the page,
// so that 32,000 tokens scroll smoothly. The list is one stop of the keyboard: the arrow keys move the chosen token.
import { html, useEffect, useMemo, useRef, useState } from "../core/lib.js";
import { color, css, ink } from "../core/colors.js";
import { number, oneLine, visible } from "../core/format.js";
import { useDark } from "../core/hooks.js";

const BLOCK = 64;
let lists = 0; // each list has its own IDs: Compare may show one capture twice
const LINE = 25; // CSS pixels; only a guess for blocks that were never shown

// texts: one for each position. values: Float32Array [positions], or null. range: [low, high].
export function Tokens({ texts, ids, values, range, measure, promptTokens, chosen, onChoose, label, onHover }) {
  const list = useRef(null);
  const own = useMemo(() => `token-${++lists}`, []);
  const dark = useDark();
  const blocks = useMemo(() => Array.from({ length: Math.ceil(texts.length / BLOCK) }, (_, index) => index), [texts]);
  const [near, setNear] = useState(() => new Set([0]));
  const heights = useRef(new Map());

  useEffect(() => {
    const observer = new IntersectionObserver(
      (entries) => setNear((before) => {
        const next = new Set(before);
        for (const { target, isIntersecting, boundingClientRect } of entries) {
          const index = Number(target.dataset.block);
          if (isIntersecting) next.add(index);
          else if (next.delete(index)) heights.current.set(index, boundingClientRect.height);
        }
        return next;
      }),
      { root: list.current, rootMargin: "400px" },
    );
    for (const block of list.current.querySelectorAll("[data-block]")) observer.observe(block);
    return () => observer.disconnect();
  }, [blocks]);

  useEffect(() => {
    if (chosen === null || chosen === undefined) return;
    const block = list.current.querySelector(`[data-block="${Math.floor(chosen / BLOCK)}"]`);
    const box = list.current.getBoundingClientRect();
    const at = block?.getBoundingClientRect();
    if (at && (at.bottom < box.top || at.top > box.bottom)) list.current.scrollTop += at.top - box.top - 40;
  }, [chosen, texts]);

  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -BLOCK, PageDown: BLOCK, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    onChoose?.(Math.min(Math.max((chosen ?? 0) + step, 0), texts.length - 1));
  };
  const positionOf = (event) => {
    const at = event.target.closest("[data-at]")?.dataset.at;
    return at === undefined ? null : Number(at);
  };
  return html`<div class="tokens" ref=${list} role="listbox" tabindex="0" aria-label=${label}
      aria-activedescendant=${chosen === null || chosen === undefined ? undefined : `${own}-${chosen}`}
      onKeyDown=${move} onMouseOver=${(event) => onHover?.(positionOf(event))} onMouseLeave=${() => onHover?.(null)}
      onClick=${(event) => { const at = positionOf(event); if (at !== null) onChoose?.(at); }}>
    ${blocks.map((index) => html`<${Block} key=${index} index=${index} isNear=${near.has(index)} guess=${heights.current.get(index)}
      texts=${texts} ids=${ids} values=${values} range=${range} measure=${measure} promptTokens=${promptTokens} dark=${dark}
      chosen=${chosen !== null && chosen !== undefined && Math.floor(chosen / BLOCK) === index ? chosen : null} list=${own} />`)}
  </div>`;
}

function Block({ index, isNear, guess, texts, ids, values, range, measure, promptTokens, dark, chosen, list }) {
  const first = index * BLOCK;
  const own = useMemo(() => texts.slice(first, first + BLOCK), [texts, first]);
  const lines = useMemo(() => Math.ceil(own.join("").length / 80) + own.filter((text) => text.includes("\n")).length, [own]);
  const shownValues = isNear && values ? values.subarray(first, first + BLOCK).join() : "";
  // The same element as before costs nothing, and a long capture has hundreds of blocks.
  return useMemo(() => (isNear ? tokensOf() : html`<div class="block" data-block=${index} role="presentation" style=${{ height: `${guess ?? Math.max(1, lines) * LINE}px` }}></div>`),
    [isNear, own, ids, isNear ? "" : guess, shownValues, isNear ? String(range) : "", measure, dark, chosen, list, promptTokens]);

  function tokensOf() {
    return html`<div class="block" data-block=${index} role="presentation">
      <span class="at" aria-hidden="true">${first}</span>
      ${own.map((text, offset) => {
        const at = first + offset;
        const rgb = values && range ? color(values[at], range, measure, dark) : null;
        const kind = `token${at < promptTokens ? " prompt" : ""}${at === chosen ? " chosen" : ""}`;
        return html`<span key=${at} id=${`${list}-${at}`} class=${kind} role="option" data-at=${at}
          aria-selected=${at === chosen} aria-label=${`position ${at}, ${oneLine(text)}, token ${ids[at]}${values ? `, ${number(values[at])}` : ""}`}
          style=${rgb ? { backgroundColor: css(rgb), color: ink(rgb) } : null}>${visible(text) || "·"}</span>`;
      })}
    </div>`;
  }
}
