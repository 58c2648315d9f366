// The steps of a replica: a column for each, its tokens in the colours of their requests.

import { byId, colour, context, seconds, themed, waitsFor } from "./text.js";

const MOST_KEPT = 400;
const GAP = 1;
const TIME_HEIGHT = 26;
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

  /** Adds steps that are newer than those that are there; numbers that go back are a new process. */
  add(steps, budget, nameOf) {
    this.budget = budget;
    this.nameOf = nameOf;
    if (!steps.length) return;
    if (this.steps.length && steps.at(-1).step < this.steps[0].step) this.steps = [];
    const last = this.steps.at(-1)?.step ?? -1;
    this.steps.push(...steps.filter((step) => step.step > last));
    this.steps.splice(0, this.steps.length - MOST_KEPT);
  }

  draw() {
    const { drawing, width, height } = context(this.canvas);
    const columns = this.#columns(width);
    const shown = this.steps.slice(-columns.number);
    const tall = height - TIME_HEIGHT - LABEL_HEIGHT;
    const most = niceTop(Math.max(1, ...shown.map(tokens)), this.budget);
    const slowest = Math.max(1e-4, ...shown.map((step) => step.seconds));
    this.#say(shown);
    if (shown.length) this.#label(drawing, width, most, slowest);
    drawing.fillStyle = themed("--blank");
    drawing.fillRect(0, LABEL_HEIGHT, width, tall);
    shown.forEach((step, index) => {
      const x = width - (shown.length - index) * columns.width;
      this.#column(drawing, step, x, columns.width - GAP, tall, most);
      const high = ((TIME_HEIGHT - 6) * step.seconds) / slowest;
      drawing.fillStyle = step.num_preemptions ? themed("--bad") : themed("--cached");
      drawing.fillRect(x, height - high, columns.width - GAP, high);
    });
    this.#mark(drawing, shown, columns, width, tall);
  }

  #label(drawing, width, most, slowest) {
    drawing.font = "11px system-ui, sans-serif";
    drawing.fillStyle = themed("--soft");
    const scale = most < this.budget ? `0 to ${most} of ${this.budget} tokens` : `budget ${this.budget} tokens`;
    drawing.fillText(scale, 2, 11);
    drawing.textAlign = "right";
    drawing.fillText(`time of a step, up to ${seconds(slowest)}`, width - 2, 11);
    drawing.textAlign = "left";
  }

  #columns(width) {
    const wide = width < 500 ? 5 : 7;
    return { width: wide, number: Math.max(1, Math.floor(width / wide)) };
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

  #mark(drawing, shown, columns, width, tall) {
    const index = shown.findIndex((step) => step.step === this.pointed);
    if (index < 0) return;
    const x = width - (shown.length - index) * columns.width;
    drawing.strokeStyle = themed("--text");
    drawing.strokeRect(x - 0.5, LABEL_HEIGHT + 0.5, columns.width, tall - 1);
    byId("step-detail").textContent = this.#detail(shown[index]);
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
    const columns = this.#columns(bounds.width);
    const fromEnd = Math.floor((bounds.right - event.clientX) / columns.width) + 1;
    this.pointed = this.steps.at(-fromEnd)?.step ?? null;
    this.draw();
  }

  #leave() {
    this.pointed = null;
    this.draw();
  }
}

const tokens = (step) => step.num_prefill_tokens + step.num_decode_tokens;

/** The top of the scale: the budget, or a power of two where steps use far less. */
function niceTop(most, budget) {
  const top = 2 ** Math.ceil(Math.log2(Math.max(8, most)));
  return budget && top >= budget / 2 ? Math.max(budget, most) : top;
}
