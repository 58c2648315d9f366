// Shows the replicas with their state and statistics. Operators also see buttons for their calls.

import { post } from "./api.js";
import { byId, count, element, percent } from "./text.js";

const isOperator = document.body.dataset.role === "operator";

/** Shows tabs to choose the replica that is drawn, if there are several replicas. */
export function showTabs(replicas, chosen, choose) {
  const tabs = replicas.length < 2 ? [] : replicas.map((replica) => {
    const tab = element("button", { type: "button", textContent: replica.name, title: replica.address });
    tab.setAttribute("aria-pressed", String(replica.address === chosen));
    tab.addEventListener("click", () => choose(replica.address));
    return tab;
  });
  byId("replica-tabs").replaceChildren(...tabs);
}

export function showReplicas(replicas, problem) {
  const box = byId("replica-cards");
  const cards = replicas.map((replica) => card(replica, problem));
  // A button must not be replaced while it is pressed.
  if (!box.querySelector("button:active, button:focus")) box.replaceChildren(...cards);
}

function card(replica, problem) {
  const stats = replica.stats;
  const rows = [["state", stateOf(replica)], ["address", replica.address]];
  if (replica.cached_tokens !== null) {
    const known = replica.directory || "in free blocks";
    rows.push(["cached", `${count(replica.cached_tokens)} tokens of prompts (${known})`]);
  }
  if (stats) {
    const held = stats.num_usable_blocks - stats.num_free_blocks;
    rows.push(
      ["requests", `${stats.num_running} run, ${stats.num_waiting} wait`],
      ["blocks", `${count(held)} of ${count(stats.num_usable_blocks)} held (${percent(held, stats.num_usable_blocks)})`],
      ["hit rate", `${percent(stats.num_cached_tokens, stats.num_prompt_tokens)} of prompt tokens`],
      ["done", `${count(stats.num_finished)} requests, ${count(stats.num_generated_tokens)} tokens`],
    );
  }
  const list = element("dl");
  for (const [name, value] of rows) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
  const made = element("div", { class: "replica" }, element("h3", { textContent: replica.name, title: replica.address }), list);
  if (isOperator) made.append(calls(replica, problem));
  return made;
}

/** Returns the state of a replica as a text. */
export function stateOf(replica) {
  if (!replica.ready) return replica.reason || "not ready";
  const stats = replica.stats;
  if (!stats) return "ready; its scheduler does not answer";
  const names = [stats.state.replace("ENGINE_STATE_", "").toLowerCase()];
  if (stats.paused && names[0] !== "paused") names.push("pausing");
  if (stats.drained) names.push("drained");
  return names.join(", ");
}

function calls(replica, problem) {
  const where = `replica=${encodeURIComponent(replica.address)}`;
  const stats = replica.stats;
  const offered = [
    stats?.paused ? ["Resume", `resume?${where}`] : ["Pause", `pause?mode=keep&${where}`],
    stats?.drained ? ["Undrain", `undrain?${where}`] : ["Drain", `drain?${where}`],
    ["Reset cache", `reset_prefix_cache?${where}`],
  ];
  const box = element("div", { class: "calls" });
  for (const [name, path] of offered) {
    const button = element("button", { type: "button", textContent: name });
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await post(path);
        problem("");
      } catch (error) {
        problem(`${name}: ${error.message}`);
      }
      button.blur();
    });
    box.append(button);
  }
  return box;
}
