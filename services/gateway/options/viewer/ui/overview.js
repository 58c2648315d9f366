// Shows the alerts, tenants, refusals, processes and Redis of the gateway that serves the page.

import { get } from "./api.js";
import { age, byId, clock, count, element, milliseconds, percent } from "./text.js";

const DAY = 86400;
const EXPIRES_SOON = 7 * DAY; // the threshold of the alert StepwellCertificateExpires
const REFUSED_BY_LOAD = new Set(["queue_full", "queue_too_long", "queue_timeout", "too_many_concurrent_requests", "queued_tokens", "too_many_large_bodies", "no_replica_ready"]);

export async function showOverview() {
  const overview = await get("activity/overview");
  showAlerts(overview);
  showTenants(overview.tenants);
  showRefusals(overview.refusals);
  showProcesses(overview.processes, overview.unix_seconds);
  showRedis(overview.redis);
}

function showAlerts({ alerts, num_rules, rules_left_out, num_series_left_out, watched_since_unix_seconds, unix_seconds }) {
  const firing = alerts.filter((alert) => alert.ended_unix_seconds === null).length;
  const hour = unix_seconds - watched_since_unix_seconds > 3600;
  const says = [
    `${firing || "no"} ${firing === 1 ? "alert fires" : "alerts fire"} now`,
    `the gateway evaluates ${num_rules} rules${hour ? "" : ` since ${clock(watched_since_unix_seconds)}`}`,
    rules_left_out.length ? `not evaluated here: ${rules_left_out.join(", ")}` : "",
    num_series_left_out ? `${num_series_left_out} series are left out, so alerts may be missing` : "",
  ];
  byId("alerts-say").textContent = says.filter(Boolean).join("; ");
  byId("alert-rows").replaceChildren(...alerts.map(alertRow));
}

function alertRow(alert) {
  const ended = alert.ended_unix_seconds;
  const tone = ended !== null ? "soft" : alert.severity === "critical" ? "bad" : "warn";
  const when = ended === null ? `since ${clock(alert.began_unix_seconds)}` : `${clock(alert.began_unix_seconds)} – ${clock(ended)}`;
  const text = element("div", {}, alert.summary);
  if (ended === null) text.append(element("p", { class: "says", textContent: alert.description }));
  const name = element("span", { class: "name", textContent: alert.name.replace(/^Stepwell/, ""), title: `${alert.name}: ${alert.runbook_url}` });
  return element(
    "li",
    {},
    element("b", { class: tone, textContent: ended === null ? alert.severity : "ended" }),
    element("div", { class: "head" }, name, element("time", { textContent: when })),
    text,
  );
}

function showTenants(tenants) {
  byId("tenants").hidden = !tenants.length;
  const rows = tenants.map((one) => {
    const bar = element("progress", { max: 1, value: one.share_of_minute });
    bar.setAttribute("aria-label", "share of the tokens of the last minute");
    return row(
      [one.tenant],
      [count(one.num_running)],
      [count(one.num_waiting), one.num_waiting ? "waits" : ""],
      [count(one.num_tokens_of_minute)],
      [element("span", {}, bar, percent(one.share_of_minute, 1))],
      [count(one.num_refused_of_hour), one.num_refused_of_hour ? "waits" : ""],
    );
  });
  byId("tenant-rows").replaceChildren(...rows);
}

function showRefusals(refusals) {
  byId("refusals-say").textContent = refusals.length ? "" : "none";
  byId("refusals").hidden = !refusals.length;
  const rows = refusals.map((one) =>
    row(
      [one.reason.replaceAll("_", " "), REFUSED_BY_LOAD.has(one.reason) ? "waits" : ""],
      [count(one.num_of_minute)],
      [count(one.num_of_hour)],
    ),
  );
  byId("refusal-rows").replaceChildren(...rows);
}

function showProcesses(processes, now) {
  const own = processes.find((one) => one.service === "gateway");
  const hasModels = new Set(processes.map((one) => one.model_name)).size > 2;
  const rows = processes.map((one) => {
    const name = [hasModels ? one.model_name : null, one.replica || one.instance, one.service, one.rank].filter((part) => part !== null).join(" ");
    return row(
      [name, "", one.instance],
      [one.version ?? "unknown", one.version === own?.version ? "" : "waits"],
      [one.protocol ?? "unknown", one.protocol === own?.protocol ? "" : "failed"],
      [age(now - one.started_unix_seconds), "wide"],
      [element("span", {}, ...one.certificates.flatMap(certificate))],
    );
  });
  byId("process-rows").replaceChildren(...rows);
}

function certificate({ certificate: purpose, seconds_left: left }) {
  const tone = left < DAY ? "failed" : left < EXPIRES_SOON ? "waits" : "";
  return [element("span", { class: tone, textContent: `${purpose} ${left > 0 ? age(left) : "expired"}` }), " "];
}

function showRedis(redis) {
  byId("redis").hidden = redis === null;
  if (redis === null) return;
  byId("redis-says").textContent = redis.error || `${redis.address} answers in ${milliseconds(redis.seconds)}`;
  byId("redis-says").classList.toggle("failed", redis.error !== "");
  const rows = redis.uses.map((use) => {
    const works = use.works ?? redis.error === "";
    return row([use.name], [works ? "works" : `without Redis: ${use.without}`, works ? "" : "failed"]);
  });
  byId("redis-rows").replaceChildren(...rows);
}

/** Makes a table row. Each cell is its content, and may have a class and a title. */
function row(...cells) {
  return element(
    "tr",
    {},
    ...cells.map(([content, tone = "", title = ""]) => element("td", { class: tone, title }, content)),
  );
}
