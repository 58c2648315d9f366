// Makes elements, readable numbers and colours.

export const byId = (id) => document.getElementById(id);

/** Makes an element with properties and children. Text is never parsed as HTML. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

/** Returns an id without its prefix, which is the kind of answer. */
export const idOf = (name) => name.replace(/^(chatcmpl|cmpl|msg|resp|embd|score)-/, "");

export const clock = (unixSeconds) => new Date(1000 * unixSeconds).toLocaleTimeString([], { hour12: false });

const digits = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);

export function seconds(value) {
  if (value < 5e-10) return "0 s";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${digits(value)} s`;
  if (value >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

export const milliseconds = (value) => `${digits(value * 1e3)} ms`;

/** Returns a long time in its two largest units. */
export function age(value) {
  const [days, hours, minutes] = [Math.floor(value / 86400), Math.floor(value / 3600) % 24, Math.floor(value / 60) % 60];
  if (days) return days >= 10 || !hours ? `${days} d` : `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : value < 60 ? seconds(Math.round(value)) : `${minutes} min`;
}

export function count(value) {
  if (value >= 1e6) return `${digits(value / 1e6)}M`;
  if (value >= 1e4) return `${digits(value / 1e3)}k`;
  return String(Math.round(value));
}

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

const REASONS = $WAITS_FOR; // The server replaces $WAITS_FOR by a table as JSON.
export const waitsFor = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ");

const dark = matchMedia("(prefers-color-scheme: dark)");
let colours = new Map();
let themes = new Map();
dark.addEventListener("change", () => {
  colours = new Map();
  themes = new Map();
});

/** Returns the value of a custom property of the style sheet, such as --line. */
export function themed(name) {
  if (!themes.has(name)) {
    themes.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return themes.get(name);
}

/** Hue, saturation and lightness of Okabe and Ito's colours, which suit colour-blind people. */
const PALETTE = [
  [202, 100, 35], [41, 100, 45], [164, 100, 31], [327, 45, 64], [202, 77, 63], [26, 100, 42], [56, 85, 55], [0, 0, 45],
];
const SHADES = [0, 14, -12];

/** Returns a request's colour, which is the same in all drawings. Successive keys have different
 * hues. When all hues are used, the shade changes. */
export function colour(key) {
  if (colours.size > 5000) colours = new Map();
  if (!colours.has(key)) {
    const [hue, saturation, lightness] = PALETTE[key % PALETTE.length];
    const shade = SHADES[Math.floor(key / PALETTE.length) % SHADES.length];
    colours.set(key, `hsl(${hue} ${saturation}% ${lightness + shade}%)`);
  }
  return colours.get(key);
}

/** Clears a canvas. Returns its context, scaled to screen pixels, and its size in CSS pixels. */
export function context(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const drawing = canvas.getContext("2d");
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return { drawing, width, height };
}
