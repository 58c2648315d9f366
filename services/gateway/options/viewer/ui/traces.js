// Lists traced requests, and shows the trace of one request: its spans and the parts of its time.

import { get } from "./api.js";
import { byId, element, idOf, seconds } from "./text.js";

const FEW_ATTEMPTS = 12;
const LABELLED_SHARE = 0.2;
const BETWEEN_ATTEMPTS = 500;
const REQUEST_ID = "stepwell.request.id";
const TIME = /^stepwell\.time/;
const OURS = /^(stepwell\.|gen_ai\.usage\.|gen_ai\.latency\.|error\.|http\.|rpc\.)/;

export class Traces {
  constructor(problem) {
    this.problem = problem;
    byId("trace-order").addEventListener("change", () => this.list());
    byId("waterfall-close").addEventListener("click", () => byId("waterfall").close());
  }

  /** Lists running requests and stored traces. */
  async list() {
    const order = byId("trace-order").value;
    const { are_kept, num_kept, traces } = await get(`traces?limit=30&order=${order}`);
    const none = order === "failed" && !traces.length ? "; none of them failed" : "";
    byId("traces-say").textContent = are_kept
      ? `${num_kept} kept: a few of each minute, and those that fail or are slow${none}`
      : "this gateway keeps no traces: a collector receives them, or tracing is off";
    byId("trace-rows").replaceChildren(...traces.map((trace) => this.#row(trace)));
  }

  /** Shows a trace. While spans may be missing, fetches it again: for a running request until its
   * end, and otherwise `attempts` times in all. */
  async open(name, attempts = 1) {
    try {
      let trace = await this.#find(name, attempts);
      this.#show(trace);
      for (let left = attempts; (trace.is_running || left > 1) && byId("waterfall").open; ) {
        await pause(BETWEEN_ATTEMPTS);
        const again = await this.#again(trace);
        if (again.is_running || again.has_ended || again.spans.length !== trace.spans.length) this.#show(again);
        if (again.has_ended) return;
        left = trace.is_running ? FEW_ATTEMPTS : left - 1;
        trace = again;
      }
    } catch (error) {
      this.problem(error.message);
    }
  }

  #show(trace) {
    show(trace);
    showTime(trace.time, (id) => this.open(id));
  }

  openSoon(name) {
    return this.open(name, FEW_ATTEMPTS);
  }

  /** Fetches a trace again. If the request has ended and its trace is not stored, returns `trace`
   * marked as ended. */
  async #again(trace) {
    try {
      return await get(`traces/${trace.trace_id}`);
    } catch (error) {
      if (error.status !== 404 || !trace.is_running) throw error;
      return { ...trace, is_running: false, has_ended: true };
    }
  }

  async #find(name, attempts) {
    for (;;) {
      try {
        return await get(`traces/${encodeURIComponent(name)}`);
      } catch (error) {
        attempts -= 1;
        if (error.status !== 404 || attempts <= 0) throw error;
        await pause(BETWEEN_ATTEMPTS);
      }
    }
  }

  #row(trace) {
    const tokens = ["input", "output"].map((kind) => trace.attributes[`gen_ai.usage.${kind}_tokens`] ?? "–");
    const button = element(
      "button",
      { type: "button", title: `${trace.request_id} ${trace.attributes["stepwell.time"] ?? ""}` },
      element("span", { class: "took", textContent: seconds(trace.seconds) }),
      element("span", { class: "name", textContent: idOf(trace.request_id || trace.trace_id) }),
      element("span", { class: trace.error ? "failed" : "", textContent: outcome(trace, tokens.join(" + ")) }),
    );
    button.addEventListener("click", () => this.open(trace.trace_id));
    return element("li", {}, button);
  }
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function outcome(trace, tokens) {
  if (trace.is_running) return "running";
  return trace.error ? "failed" : trace.attributes["stepwell.client_error"] || tokens;
}

function state(trace) {
  if (trace.has_ended) return "; it has ended since, and tracing is off";
  if (trace.is_running) return "; it runs, and these are its spans so far";
  return trace.is_complete ? "" : "; further spans will arrive";
}

/** Identifies a span. Each time a running request is fetched, its spans have new ids. */
const keyOf = (span) => `${span.name}@${span.start}`;

function show(trace) {
  const total = Math.max(1e-6, ...trace.spans.map((span) => span.start + span.seconds));
  const opened = new Set([...document.querySelectorAll(".span dl")].map((list) => list.dataset.span));
  byId("waterfall-title").textContent = idOf(trace.request_id) || "Request";
  byId("waterfall-title").title = trace.request_id;
  byId("waterfall-says").replaceChildren(
    `${seconds(total)}, trace ${trace.trace_id}${state(trace)}`,
    ...legend(trace.spans),
  );
  const rows = trace.spans.map((span) => row(span, total));
  byId("waterfall-rows").replaceChildren(...rows);
  trace.spans.forEach((span, index) => opened.has(keyOf(span)) && toggle(rows[index], span));
  if (!byId("waterfall").open) byId("waterfall").showModal();
}

/** Shows the parts of the time as sections of a bar. Pointing at or clicking a part explains it. */
function showTime(time, open) {
  byId("waterfall-time").textContent = time?.line ?? "";
  byId("waterfall-part").replaceChildren();
  const parts = time?.parts ?? [];
  const bars = parts.map((part) => {
    const bar = element("button", { type: "button", class: `part ${part.name}`, title: part.explanation });
    bar.style.flexGrow = part.seconds;
    if (part.seconds > LABELLED_SHARE * time.seconds) bar.append(`${part.name} ${seconds(part.seconds)}`);
    bar.setAttribute("aria-label", `${part.name} ${seconds(part.seconds)}`);
    for (const kind of ["click", "pointerenter", "focus"]) bar.addEventListener(kind, () => explain(part, open));
    return bar;
  });
  byId("waterfall-parts").replaceChildren(...bars);
}

function explain(part, open) {
  const told = [`${part.name}, ${seconds(part.seconds)}: ${part.explanation}`];
  if (part.waited_for) {
    const link = element("button", { class: "link", type: "button", textContent: idOf(part.waited_for) });
    link.addEventListener("click", () => open(part.waited_for));
    told.push(" Request ", link, " held most of the missing resource.");
  }
  if (part.step !== null) told.push(` The longest wait began with step ${part.step}.`);
  byId("waterfall-part").replaceChildren(...told);
}

function legend(spans) {
  const services = [...new Set(spans.map((span) => span.service))];
  const entries = services.map((service) => [service, service.replace("stepwell-", "")]);
  if (spans.some(isWait)) entries.push(["wait", "waits"]);
  return entries.map(([kind, name]) => {
    const track = element("span", { class: "track" }, element("i", { class: kind }));
    return element("span", { class: "service" }, track, name);
  });
}

/** Whether a span is a wait. Such a span has the reason of the wait as an attribute. */
const isWait = (span) => Object.keys(span.attributes).some((name) => name.endsWith(".wait_reason"));

function row(span, total) {
  const bar = element("i", { class: [span.error ? "error" : span.service, isWait(span) ? "wait" : ""].join(" ") });
  bar.style.left = `${(100 * span.start) / total}%`;
  bar.style.width = `${(100 * span.seconds) / total}%`;
  const track = element("div", { class: "track" }, bar);
  for (const event of span.events) {
    const mark = element("b", { title: event.name });
    mark.style.left = `${(100 * event.at) / total}%`;
    track.append(mark);
  }
  const name = element("span", { class: "name", textContent: span.name, title: span.name });
  name.style.paddingLeft = `${span.depth}em`;
  const head = element(
    "button",
    { class: "head", type: "button" },
    name,
    track,
    element("span", { class: "took", textContent: seconds(span.seconds) }),
  );
  const made = element("div", { class: "span" }, head);
  const why = said(span);
  if (why) {
    const note = element("div", { class: span.error ? "why failed" : "why", textContent: why });
    note.style.paddingLeft = `${span.depth + 0.4}em`;
    made.append(note);
  }
  head.addEventListener("click", () => toggle(made, span));
  return made;
}

/** Returns a span's error, its own attributes that are not empty, and its events as one line. */
function said(span) {
  const parts = Object.entries(span.attributes)
    .filter(([name, value]) => OURS.test(name) && !TIME.test(name) && name !== REQUEST_ID && ![0, "", null].includes(value))
    .filter(([, value]) => !span.name.endsWith(`.${value}`))
    .map(([name, value]) => `${name.replace(OURS, "")} ${shown(value)}`);
  const events = span.events.map((event) => {
    const why = Object.values(event.attributes).map(shown).join(" ");
    return `${event.name} ${why} at ${seconds(event.at)}`;
  });
  return [...(span.error ? [span.error] : []), ...parts, ...events].join(" · ");
}

const shown = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value));

/** Shows the attributes of a span, or hides them if they are shown. */
function toggle(made, span) {
  const list = made.querySelector("dl");
  if (list) {
    list.remove();
    return;
  }
  const attributes = element("dl");
  attributes.dataset.span = keyOf(span);
  const rows = { service: span.service, start: seconds(span.start), links: span.num_links, ...span.attributes };
  for (const [name, value] of Object.entries(rows)) {
    attributes.append(element("dt", { textContent: name }), element("dd", { textContent: shown(value) }));
  }
  made.append(attributes);
}
