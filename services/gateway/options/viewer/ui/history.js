// Draws the last minutes: curves of latencies, rates, queues and pools, and a list of events.

import { get } from "./api.js";
import { byId, clock, context, count, element, seconds, themed } from "./text.js";

const [TOP, BOTTOM] = [13, 14];
const BAD = new Set(["lost", "failed"]);
const WARNS = new Set(["paused", "drained", "refused", "restarted"]);

const latency = (name) => [
  { name: "median", line: "--line-1", value: (history, at) => history[name][at]?.[0] ?? null, text: seconds },
  { name: "p99", line: "--line-2", value: (history, at) => history[name][at]?.[1] ?? null, text: seconds },
];
const number = (name, line, key, text = count) => ({ name, line, value: (history, at) => history[key][at], text });
const rate = (name, line, key) => ({
  name,
  line,
  value: (history, at) => history[key][at] / lengthOf(history, at),
  text: (value) => `${value < 10 ? value.toFixed(1) : count(value)}/s`,
});
/** Returns the length of a time bin in seconds. Of the current bin, only past seconds count. */
const lengthOf = (history, at) =>
  Math.min(history.bin_seconds, Math.max(2, history.unix_seconds - history.began_unix_seconds[at]));
const CHARTS = [
  ["Time to first token", latency("first_token_seconds")],
  ["Time per token", latency("per_token_seconds")],
  ["Whole answer", latency("request_seconds")],
  ["Requests", [rate("answered", "--line-1", "num_ended"), rate("refused", "--line-2", "num_refused")]],
  ["Tokens generated", [rate("tokens", "--line-1", "num_tokens")]],
  ["Queue", [number("running", "--line-1", "num_running"), number("waiting", "--line-2", "num_waiting")]],
  ["Blocks held", [number("held", "--line-1", "held_share", (value) => `${(100 * value).toFixed(1)} %`)]],
];

export class History {
  constructor() {
    this.history = null;
    this.pointed = null;
    this.charts = CHARTS.map(([title, lines]) => {
      const canvas = element("canvas");
      const says = element("span");
      const chart = { title, lines, canvas, says };
      canvas.addEventListener("pointermove", (event) => this.#point(event, canvas));
      canvas.addEventListener("pointerdown", (event) => this.#point(event, canvas));
      canvas.addEventListener("pointerleave", () => this.#point(null, canvas));
      canvas.setAttribute("aria-label", title);
      byId("curves").append(element("figure", {}, element("figcaption", {}, element("b", { textContent: title }), says), canvas));
      return chart;
    });
  }

  async look() {
    this.history = await get("activity/history");
    this.#list();
    this.draw();
  }

  draw() {
    if (this.history) for (const chart of this.charts) this.#draw(chart);
  }

  #draw({ lines, canvas, says }) {
    const { history } = this;
    const number = history.began_unix_seconds.length;
    const at = this.pointed === null ? number - 1 : Math.min(this.pointed, number - 1);
    const { drawing, width, height } = context(canvas);
    const curves = lines.map((line) => history.began_unix_seconds.map((_, index) => line.value(history, index)));
    const top = niceTop(Math.max(0, ...curves.flat()));
    const x = (index) => (number < 2 ? width : (width * index) / (number - 1));
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
    this.#marks(drawing, height, x);
    drawing.strokeStyle = themed("--line");
    drawing.strokeRect(0, y(0) + 0.5, width, 0);
    lines.forEach((line, which) => curve(drawing, curves[which], x, y, themed(line.line)));
    drawing.font = "10px system-ui, sans-serif";
    drawing.fillStyle = themed("--soft");
    drawing.fillText(clock(history.began_unix_seconds[0]), 0, height - 2);
    drawing.textAlign = "right";
    drawing.fillText(clock(history.began_unix_seconds[at]), width, height - 2);
    drawing.fillText(lines[0].text(top), width, 10);
    drawing.textAlign = "left";
    if (this.pointed !== null) {
      drawing.fillStyle = themed("--text");
      drawing.fillRect(x(at), TOP, 1, height - TOP - BOTTOM);
    }
    says.replaceChildren(...lines.map((line, which) => legend(line, lastOf(curves[which], at, this.pointed !== null))));
  }

  /** Draws a vertical line for each event, except refusals, which have their own curve. */
  #marks(drawing, height, x) {
    const { began_unix_seconds: began, bin_seconds: long, events } = this.history;
    for (const event of events) {
      const index = (event.unix_seconds - began[0]) / long - 0.5;
      if (index < -0.5 || event.kind === "refused") continue;
      drawing.fillStyle = themed(toneOf(event));
      drawing.globalAlpha = 0.7;
      drawing.fillRect(Math.max(0, x(Math.max(0, index)) - 1), 0, 2, height - BOTTOM);
      drawing.globalAlpha = 1;
    }
  }

  #list() {
    const { events } = this.history;
    byId("events-say").textContent = events.length ? "" : "nothing was lost, paused, refused or failed";
    const rows = [...events].reverse().map((event) =>
      element(
        "li",
        {},
        element("time", { textContent: clock(event.unix_seconds) }),
        element("b", { class: toneOf(event).slice(2), textContent: event.kind }),
        [event.replica, event.text].filter(Boolean).join(": ") + (event.count > 1 ? ` (${event.count} times)` : ""),
      ),
    );
    byId("event-rows").replaceChildren(...rows);
  }

  #point(event, canvas) {
    const bounds = canvas.getBoundingClientRect();
    const last = (this.history?.began_unix_seconds.length ?? 1) - 1;
    this.pointed = event ? Math.round(((event.clientX - bounds.left) / bounds.width) * last) : null;
    this.draw();
  }
}

const toneOf = (event) => (BAD.has(event.kind) ? "--bad" : WARNS.has(event.kind) ? "--warn" : "--good");

/** Returns the value at an index if the user points at it, and otherwise the newest value. */
function lastOf(values, at, isPointed) {
  if (isPointed) return values[at];
  return values.findLast((value) => value !== null) ?? null;
}

function legend(line, value) {
  const mark = element("i");
  mark.style.background = themed(line.line);
  return element("span", {}, mark, `${line.name} ${value === null ? "–" : line.text(value)}`);
}

function curve(drawing, values, x, y, stroke) {
  drawing.strokeStyle = drawing.fillStyle = stroke;
  drawing.lineWidth = 1.5;
  drawing.beginPath();
  let isOpen = false;
  values.forEach((value, index) => {
    if (value === null) {
      isOpen = false;
      return;
    }
    if (isOpen) drawing.lineTo(x(index), y(value));
    else drawing.moveTo(x(index), y(value));
    if (!isOpen && (values[index + 1] ?? null) === null) drawing.fillRect(x(index) - 1.5, y(value) - 1.5, 3, 3);
    isOpen = true;
  });
  drawing.stroke();
  drawing.lineWidth = 1;
}

/** Returns the smallest round number that is at least `most`. */
function niceTop(most) {
  if (!most) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= most);
}
