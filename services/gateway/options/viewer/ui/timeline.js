// Draws the steps of a replica over time. Each step is a column of tokens in the requests' colours.

import { byId, colour, context, seconds, themed, waitsFor } from "./text.js";

const MOST_KEPT = 1200;
const GAP = 1;
const PIXELS_OF_A_STEP = 5;
const WINDOWS = [0.2, 0.5, 1, 2, 5, 10, 20, 60, 120];
const TICKS = 5;
const TIME_HEIGHT = 28;
const LABEL_HEIGHT = 16;

export class Timeline {
  constructor() {
    this.canvas = byId("timeline");
    this.steps = [];
    this.budget = 0;
    this.nameOf = (key) => `request ${key}`;
    this.pointed = null;
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
  }

  clear() {
    this.steps = [];
  }

  /** Adds new steps. If the last has a lower number than before, a new scheduler process runs. */
  add(steps, budget, nameOf) {
    this.budget = budget;
    this.nameOf = nameOf;
    if (!steps.length) return;
    if (this.steps.length && steps.at(-1).step < this.steps.at(-1).step) this.steps = [];
    const last = this.steps.at(-1)?.step ?? -1;
    this.steps.push(...steps.filter((step) => step.step > last));
    this.steps.splice(0, this.steps.length - MOST_KEPT);
  }

  draw() {
    const { drawing, width, height } = context(this.canvas);
    const view = this.#view(width);
    const tall = height - TIME_HEIGHT - LABEL_HEIGHT;
    const most = niceTop(Math.max(1, ...view.shown.map(tokens)));
    const slowest = Math.max(1e-4, ...view.shown.map((step) => step.seconds));
    this.#say(view.shown);
    drawing.fillStyle = themed("--blank");
    drawing.fillRect(0, LABEL_HEIGHT, width, tall);
    if (view.shown.length) this.#label(drawing, width, height, view, most, slowest);
    for (const step of view.shown) {
      const [x, wide] = view.place(step);
      this.#column(drawing, step, x, wide, tall, most);
      const high = ((TIME_HEIGHT - 8) * step.seconds) / slowest;
      drawing.fillStyle = step.num_preemptions ? themed("--bad") : themed("--cached");
      drawing.fillRect(x, height - high, wide, high);
    }
    this.#mark(drawing, view, tall);
  }

  /** Returns the latest steps and a function for their positions. A usual step has some pixels. */
  #view(width) {
    const last = this.steps.at(-1);
    if (!last) return { shown: [], long: 0, place: () => [0, 0] };
    const end = endOf(last);
    const recent = this.steps.slice(-100).map((step) => step.seconds).sort((one, other) => one - other);
    const usual = Math.max(1e-4, recent[recent.length >> 1]);
    const wanted = (width / PIXELS_OF_A_STEP) * usual;
    const window = WINDOWS.find((one) => one >= wanted) ?? WINDOWS.at(-1);
    const long = Math.min(window, Math.max(end - this.steps[0].began_unix_seconds, usual));
    const shown = this.steps.filter((step) => endOf(step) > end - long);
    const scale = width / long;
    const place = (step) => {
      const from = Math.max(0, width - (end - step.began_unix_seconds) * scale);
      const wide = width - (end - endOf(step)) * scale - from;
      return [from, Math.max(1, wide - (wide > 3 ? GAP : 0))];
    };
    return { shown, long, end, scale, place };
  }

  #label(drawing, width, height, view, most, slowest) {
    drawing.font = "11px system-ui, sans-serif";
    drawing.fillStyle = themed("--soft");
    const isNarrow = width < 480;
    drawing.fillText(isNarrow ? `≤ ${most} tokens` : `up to ${most} tokens a step, of a budget of ${this.budget}`, 2, 11);
    drawing.textAlign = "right";
    const times = isNarrow ? `steps ≤ ${seconds(slowest)}` : `; below, the time of each step, up to ${seconds(slowest)}`;
    drawing.fillText(isNarrow ? `${seconds(view.long)}, ${times}` : `${seconds(view.long)} in all${times}`, width - 2, 11);
    drawing.textAlign = "left";
    drawing.fillStyle = themed("--line");
    for (let tick = 1; tick < TICKS; tick++) {
      drawing.fillRect((width * tick) / TICKS, LABEL_HEIGHT, 1, height - LABEL_HEIGHT);
    }
  }

  #column(drawing, step, x, wide, tall, most) {
    let y = LABEL_HEIGHT + tall;
    const named = step.num_tokens.reduce((sum, number) => sum + number, 0);
    const segments = step.keys.map((key, index) => [colour(key), step.num_tokens[index]]);
    segments.push([themed("--soft"), tokens(step) - named]);
    for (const [fill, number] of segments) {
      const high = (tall * number) / most;
      y -= high;
      drawing.fillStyle = fill;
      drawing.fillRect(x, y, wide, Math.max(high - (high > 3 ? 0.6 : 0), 0));
    }
  }

  #mark(drawing, view, tall) {
    const step = view.shown.find((one) => one.step === this.pointed);
    if (!step) return;
    const [x, wide] = view.place(step);
    drawing.strokeStyle = themed("--text");
    drawing.strokeRect(x - 0.5, LABEL_HEIGHT + 0.5, wide + 1, tall - 1);
    byId("step-detail").textContent = this.#detail(step);
  }

  #say(shown) {
    const recent = shown.slice(-100);
    if (!recent.length) {
      byId("steps-say").textContent = "no step since this page was opened";
      return;
    }
    const sum = (value) => recent.reduce((total, step) => total + value(step), 0);
    const share = (number) => `${((100 * number) / (recent.length * this.budget)).toFixed(1)} %`;
    const prefill = sum((step) => step.num_prefill_tokens);
    const decode = sum((step) => step.num_decode_tokens);
    byId("steps-say").textContent =
      `of the budget: prefill ${share(prefill)}, decode ${share(decode)}, ` +
      `unused ${share(recent.length * this.budget - prefill - decode)}, in the last ${recent.length} steps`;
  }

  #detail(step) {
    const parts = step.keys.slice(0, 6).map((key, index) => `${this.nameOf(key)} ${step.num_tokens[index]}`);
    const more = step.num_requests - parts.length;
    if (more > 0) parts.push(`${more} more`);
    const why = step.wait_reason ? `; others wait for ${waitsFor(step.wait_reason)}` : "";
    const preempted = step.num_preemptions ? `; ${step.num_preemptions} preempted` : "";
    return (
      `step ${step.step}, ${seconds(step.seconds)}: ${step.num_prefill_tokens} prefill + ` +
      `${step.num_decode_tokens} decode of ${this.budget}${preempted}${why}. Tokens: ${parts.join(", ")}`
    );
  }

  #point(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const view = this.#view(bounds.width);
    if (!view.shown.length) return;
    const at = view.end - (bounds.right - event.clientX) / view.scale;
    this.pointed = view.shown.findLast((step) => step.began_unix_seconds <= at)?.step ?? null;
    this.draw();
  }

  #leave() {
    this.pointed = null;
    this.draw();
  }
}

const tokens = (step) => step.num_prefill_tokens + step.num_decode_tokens;

const endOf = (step) => step.began_unix_seconds + step.seconds;

/** Returns a round number of tokens that is at least `most`. */
const niceTop = (most) => (most <= 8 ? 8 : 2 ** Math.ceil(Math.log2(most)));
