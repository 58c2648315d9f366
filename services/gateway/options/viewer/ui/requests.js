// Shows the running and waiting requests of a replica, and the numbers at the top of the page.

import { byId, colour, count, element, idOf, percent, seconds, waitsFor } from "./text.js";

const HIDDEN_ID = "another tenant's";

export const nameOf = (request) => request.request_id || HIDDEN_ID;

/** Shows a row for each request. `open` is called with a request that is clicked. */
export function showRequests(queued, replica, open) {
  const requests = replica.requests;
  const running = requests.filter((request) => request.state === "running");
  const waiting = requests.filter((request) => request.state !== "running");
  const parts = [said(running, waiting, queued, replica.stats), ...pausing(replica.programs)];
  byId("requests-say").textContent = parts.join("; ");
  const rows = [
    ...queued.map(queuedRow),
    ...waiting.map((request) => row(request, open)),
    ...running.map((request) => row(request, open, replica.stats?.state === "ENGINE_STATE_PAUSED")),
  ];
  byId("request-rows").replaceChildren(...rows);
}

function said(running, waiting, queued, stats) {
  const parts = [`${running.length} of ${stats?.max_num_seqs ?? "?"} run`];
  const reasons = new Map();
  for (const one of [...waiting, ...queued]) {
    const why = one.wait_reason ? `for ${waitsFor(one.wait_reason)}` : "for the next step";
    reasons.set(why, (reasons.get(why) ?? 0) + 1);
  }
  for (const [why, number] of reasons) parts.push(`${number} ${number === 1 ? "waits" : "wait"} ${why}`);
  return parts.join(", ");
}

/** Returns a text about the paused programs as an array, which is empty without such programs. */
function pausing(programs) {
  if (!programs.length) return [];
  const blocks = programs.reduce((sum, one) => sum + one.num_blocks, 0);
  const names = programs.slice(0, 4).map((one) => {
    const tool = one.tool ? `${one.tool}, ` : "";
    return `${idOf(one.program || HIDDEN_ID)} (${tool}${seconds(one.seconds)})`;
  });
  const verb = programs.length === 1 ? "program pauses" : "programs pause";
  return [`${programs.length} ${verb} with ${blocks} blocks: ${names.join(", ")}`];
}

function queuedRow(queued) {
  const name = queued.request_id || HIDDEN_ID;
  const age = queued.seconds === null ? "" : seconds(queued.seconds);
  return element(
    "tr",
    {},
    element("td", { title: name }, swatch(null), idOf(name)),
    element("td", { class: "waits", textContent: `at the gateway, for ${waitsFor(queued.wait_reason)}` }),
    element("td"),
    element("td", { class: "wide" }),
    element("td", { class: "wide", textContent: age }),
  );
}

function row(request, open, isPaused = false) {
  const runs = request.state === "running";
  const total = request.num_prompt_tokens + request.num_output_tokens;
  const bar = element("progress", { max: Math.max(1, total), value: request.num_computed_tokens });
  bar.setAttribute("aria-label", "computed tokens");
  const why = request.wait_reason ? `waits for ${waitsFor(request.wait_reason)}` : "waits";
  const does = isPaused ? "paused" : request.num_output_tokens ? "decodes" : "prefill";
  const state = runs ? does : why;
  const again = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
  return element(
    "tr",
    { tabIndex: 0, onclick: () => open(request), onkeydown: (event) => event.key === "Enter" && open(request) },
    element("td", { title: nameOf(request) }, swatch(request.key), idOf(nameOf(request))),
    element("td", { class: runs && !isPaused ? "" : "waits", textContent: state + again }),
    element("td", {}, bar, `${request.num_prompt_tokens} + ${request.num_output_tokens}`),
    element("td", { class: "wide", textContent: request.num_cached_tokens }),
    element("td", { class: "wide", textContent: seconds(request.seconds) }),
  );
}

export function swatch(key) {
  const made = element("span", { class: "swatch" });
  if (key !== null) made.style.background = colour(key);
  return made;
}

/** Shows the numbers of one replica. Rates are computed from the sample `before`. */
export function showNumbers(replica, before, elapsed) {
  const stats = replica.stats;
  const box = byId("numbers");
  if (!stats) {
    box.replaceChildren();
    return;
  }
  const old = before?.stats?.incarnation === stats.incarnation ? before.stats : null;
  const rate = (name) => (old && elapsed > 0 ? `${count((stats[name] - old[name]) / elapsed)}/s` : "–");
  const held = stats.num_usable_blocks - stats.num_free_blocks;
  const numbers = [
    [`${stats.num_running} / ${stats.max_num_seqs}`, "running"],
    [String(stats.num_waiting), "waiting"],
    [rate("num_steps"), "steps"],
    [stats.num_steps ? seconds(stats.mean_step_nanos / 1e9) : "–", "a step"],
    [rate("num_generated_tokens"), "tokens generated"],
    [percent(held, stats.num_usable_blocks), "of blocks held"],
    [percent(stats.num_cached_tokens, stats.num_prompt_tokens), "of prompts cached"],
    [count(stats.num_preemptions), "preemptions"],
  ];
  box.replaceChildren(
    ...numbers.map(([value, name]) =>
      element("div", {}, element("b", { textContent: value }), element("span", { textContent: name })),
    ),
  );
}
