// The page: fetches the replicas' activity several times per second while visible, and draws it.

import { get, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Pool } from "./pool.js";
import { History } from "./history.js";
import { showModels } from "./models.js";
import { showReplicas, showTabs, stateOf } from "./replicas.js";
import { showOverview } from "./overview.js";
import { nameOf, showNumbers, showRequests } from "./requests.js";
import { byId, idOf } from "./text.js";
import { Timeline } from "./timeline.js";
import { Traces } from "./traces.js";

const PERIOD = 400;
const PERIOD_AFTER_ERROR = 2000;
const TRACES_PERIOD = 3000;
const HISTORY_PERIOD = 2000;
const OVERVIEW_PERIOD = 5000;
const RATE_SECONDS = 1;
const PROBLEM_SHOWN = 8000;

const isOperator = document.body.dataset.role === "operator";
const timeline = new Timeline();
const pool = new Pool();
const history = new History();
const traces = new Traces(problem);
const chat = new Chat(traces);
const names = new Map();
let chosen = null;
let looks = [];
let tracesListed = 0;
let historySeen = 0;
let overviewSeen = 0;
let showsProblem = "";
let hiding = 0;

byId("chat").hidden = isOperator;
byId("key-button").addEventListener("click", askForKey);
byId("key-form").addEventListener("submit", () => setKey(byId("key-text").value.trim()));
window.addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => document.hidden || wake());

let wake = () => {};
run();

async function run() {
  for (;;) {
    let wait = PERIOD;
    if (!document.hidden) {
      try {
        await look();
      } catch (error) {
        wait = failed(error);
      }
    }
    await new Promise((done) => {
      wake = done;
      setTimeout(done, wait);
    });
  }
}

async function look() {
  const activity = await get(`activity${query()}`);
  setState(...stateOfAll(activity));
  if (showsProblem === "look") problem("");
  chat.model = activity.model;
  showModels(activity);
  looks.push({ activity, at: activity.unix_seconds });
  while (looks.length > 2 && looks[1].at < activity.unix_seconds - 2 * RATE_SECONDS) looks.shift();
  show(activity);
  if (performance.now() >= historySeen + HISTORY_PERIOD || !historySeen) {
    historySeen = performance.now();
    await history.look();
  }
  if (performance.now() >= overviewSeen + OVERVIEW_PERIOD || !overviewSeen) {
    overviewSeen = performance.now();
    // Not awaited, because a replica or Redis that does not answer delays it.
    showOverview().catch((error) => (byId("alerts-say").textContent = error.message));
  }
  if (performance.now() >= tracesListed + TRACES_PERIOD || !tracesListed) {
    tracesListed = performance.now();
    await traces.list();
  }
}

/** Returns the query for the chosen replica, with only the steps that the timeline lacks. */
function query() {
  if (!chosen) return "";
  const address = encodeURIComponent(chosen);
  const last = timeline.steps.at(-1);
  return `?replica=${address}${last ? `&after=${last.step}@${address}` : ""}`;
}

function show(activity) {
  const replicas = activity.replicas;
  if (!replicas.some((replica) => replica.address === chosen)) choose(replicas[0]?.address ?? null);
  showTabs(replicas, chosen, choose);
  showReplicas(replicas, problem);
  const replica = replicas.find((one) => one.address === chosen);
  if (!replica) return;
  const recent = (one) => one.at >= activity.unix_seconds - RATE_SECONDS - PERIOD / 1000;
  const before = looks.slice(0, -1).find(recent) ?? looks.at(-2);
  const old = before?.activity.replicas.find((one) => one.address === chosen);
  showNumbers(replica, old, activity.unix_seconds - (before?.at ?? 0));
  for (const request of replica.requests) names.set(request.key, nameOf(request));
  while (names.size > 2000) names.delete(names.keys().next().value);
  showRequests(activity.queued, replica, open);
  const called = (key) => (names.has(key) ? idOf(names.get(key)) : `request ${key}`);
  timeline.add(replica.steps, replica.stats?.max_num_batched_tokens ?? timeline.budget, called);
  pool.set(replica.blocks, replica.stats?.block_size ?? pool.blockSize, called);
  draw();
}

function draw() {
  history.draw();
  timeline.draw();
  pool.draw();
}

/** Returns the CSS class and the text of the page's state. "live" means that all replicas run. */
function stateOfAll({ replicas, draining }) {
  const ready = replicas.filter((replica) => replica.ready);
  if (!ready.length) return ["away", "no replica is ready"];
  const paused = ready.filter((replica) => replica.stats?.paused);
  const which = (some) => (replicas.length > 1 ? `${some.map((one) => one.name).join(", ")}: ` : "");
  if (paused.length) return ["paused", `${which(paused)}${stateOf(paused[0])}`];
  const away = replicas.filter((replica) => !replica.ready);
  if (away.length) return ["paused", `${which(away)}${stateOf(away[0])}`];
  return draining ? ["paused", "draining"] : ["live", "live"];
}

function choose(address) {
  if (address === chosen) return;
  chosen = address;
  timeline.clear();
  names.clear();
  wake();
}

function open(request) {
  const name = request.trace_id || request.request_id;
  if (name) traces.openSoon(name);
  else problem(`${nameOf(request)} is not yours to see`);
}

function failed(error) {
  setState("away", error.status ? "refused" : "away");
  if (error.status === 401 || error.status === 403) askForKey();
  problem(error.status ? error.message : "the server does not answer; asking again");
  showsProblem = "look";
  return PERIOD_AFTER_ERROR;
}

function setState(kind, text) {
  byId("state").className = kind;
  byId("state").textContent = text;
}

/** Shows a message for some seconds, or until the next message. */
function problem(text) {
  showsProblem = "";
  clearTimeout(hiding);
  hiding = setTimeout(() => (byId("problem").hidden = true), PROBLEM_SHOWN);
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function askForKey() {
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}
