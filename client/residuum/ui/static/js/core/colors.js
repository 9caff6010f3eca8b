// Colours of values. "norm" has one hue, on a logarithmic scale, and "feature" one from 0 on. Signed measures have two hues
// around 0, and "probability" around 0.5. In a dark page, small values are dark, so that large ones stand out in both.

const SEQUENTIAL = {
  light: [[247, 248, 252], [199, 211, 244], [125, 150, 226], [60, 88, 190], [25, 40, 110]],
  dark: [[33, 34, 38], [48, 58, 104], [72, 96, 176], [128, 154, 236], [214, 224, 255]],
};
const DIVERGING = {
  light: [[33, 102, 172], [146, 197, 222], [248, 248, 247], [244, 165, 130], [178, 24, 43]],
  dark: [[126, 190, 245], [48, 100, 148], [36, 36, 38], [150, 66, 54], [255, 150, 128]],
};

export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const isSigned = (measure) => measure !== "norm" && measure !== "feature";

// Return [r, g, b] for a value in a range [low, high]; null if it is not a number.
export function color(value, [low, high], measure, dark = isDark()) {
  if (!Number.isFinite(value) || low === null) return null;
  return paletteOf(measure, dark)[levelOf(value, low, high, measure)];
}

// Fill pixels, 32 bits each, with the colours of values; those of what is no number stay transparent.
export function paint(pixels, values, [low, high], measure, dark) {
  if (low === null) return;
  const packed = paletteOf(measure, dark).packed;
  for (let at = 0; at < pixels.length; at++) if (Number.isFinite(values[at])) pixels[at] = packed[levelOf(values[at], low, high, measure)];
}

const LEVELS = 255; // odd, so that 0 has the middle colour of signed measures
const palettes = new Map();

// The colours from the lowest level to the highest. Computing them for each of 30,000 cells takes too long.
function paletteOf(measure, dark) {
  const name = `${isSigned(measure)} ${dark}`;
  if (palettes.has(name)) return palettes.get(name);
  const stops = (isSigned(measure) ? DIVERGING : SEQUENTIAL)[dark ? "dark" : "light"];
  const found = Array.from({ length: LEVELS }, (_, level) => {
    const place = (level / (LEVELS - 1)) * (stops.length - 1);
    const at = Math.min(Math.floor(place), stops.length - 2);
    return stops[at].map((part, index) => Math.round(part + (stops[at + 1][index] - part) * (place - at)));
  });
  found.packed = new Uint32Array(new Uint8Array(found.flatMap((rgb) => [...rgb, 255])).buffer);
  palettes.set(name, found);
  return found;
}

function levelOf(value, low, high, measure) {
  const share = high > low ? Math.min(Math.max(shareOf(value, low, high, measure), 0), 1) : isSigned(measure) ? 0.5 : 0;
  return Math.round(share * (LEVELS - 1));
}

function shareOf(value, low, high, measure) {
  if (measure !== "norm" || low <= 0) return (value - low) / (high - low);
  return Math.log(Math.max(value, low) / low) / Math.log(high / low);
}

// The text colour that can be read on a colour. At this relative luminance, black and white have the same contrast, 4.58;
// WCAG asks for 4.5.
export function ink([red, green, blue]) {
  const linear = (part) => ((part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return luminance > 0.179 ? "#000" : "#fff";
}

export const css = (rgb) => `rgb(${rgb.join(" ")})`;

// The range of colours: that of all layers, or of each. Signed measures have 0 in the middle.
export function rangesFor(ranges, measure, each) {
  if (measure === "probability") return ranges.map(([low]) => (low === null ? [null, null] : [0, 1]));
  if (measure === "feature") ranges = ranges.map(([low, high]) => [low === null ? null : Math.min(low, 0), high]);
  const known = ranges.filter(([low]) => low !== null);
  const whole = known.length ? [Math.min(...known.map(([low]) => low)), Math.max(...known.map(([, high]) => high))] : [null, null];
  const centred = ([low, high]) => (low === null || !isSigned(measure) ? [low, high] : [-Math.max(-low, high), Math.max(-low, high)]);
  return ranges.map((own) => centred(each ? own : whole));
}
