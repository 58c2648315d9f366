"""Formats the state of the fleet as JSON, from the last sample of its metrics."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.gateway.core.caller import Caller
from services.gateway.options.viewer.core.alerts.alerts import LISTED_SECONDS, Alert
from services.gateway.options.viewer.core.alerts.series_store import Labels, SeriesStore, Vector
from services.gateway.options.viewer.overview.fleet_watch import MINUTE, FleetWatch

Document = dict[str, Any]
MAX_ALERTS = 100
_SERVICES = {"gateway": 0, "scheduler": 1, "kvpool": 2, "worker": 3}
_COMPLETE = ("exact", "unused")
"""The states of the index of cached prefixes in which it misses nothing."""


def overview_document(watch: FleetWatch, caller: Caller | None) -> Document:
    """Describes what `caller` may see: its own tenant, and processes and alerts of its models. None
    means that everything is described.
    """
    store = watch.store

    def is_shown(labels: Mapping[str, str | None]) -> bool:
        model, tenant = labels.get("model_name"), labels.get("tenant")
        return caller is None or (
            (not model or caller.may_use(model)) and tenant in (None, caller.caller_id)
        )

    alerts = [one for one in watch.alerts.listed(store.now) if is_shown(one.labels)]
    return {
        "unix_seconds": store.now,
        "watched_since_unix_seconds": store.began,
        "gateway": watch.gateway,
        "alerts": [_alert(alert) for alert in alerts[:MAX_ALERTS]],
        "num_rules": len(watch.rules.alerts),
        "rules_left_out": watch.rules.not_supported,
        "num_series_left_out": store.num_left_out,
        "tenants": [one for one in _tenants(store) if is_shown(one)],
        "refusals": _refusals(store),
        "processes": [one for one in _processes(store) if is_shown(one)],
    }


def redis_uses(store: SeriesStore) -> list[Document]:
    """Lists what the gateway and its replicas use Redis for, whether it works by the last calls,
    and what happens without.
    """
    works: dict[tuple[str, str], bool] = {}

    def add(name: str, without: str, *, does: bool) -> None:
        works[name, without] = does and works.get((name, without), True)

    for labels, value in store.vector("stepwell_discovery_up").items():
        if ("source", "redis") in labels:
            add("list of replicas", "new replicas are not found", does=value == 1)
    for labels, value in store.vector("stepwell_prefix_index_state").items():
        if value == 1:
            does = dict(labels).get("state") in _COMPLETE
            add("index of cached prefixes", "replicas are chosen by load", does=does)
    for labels, value in store.vector("stepwell_registration_up").items():
        name = f"registration of {dict(labels).get('engine', '')}"
        add(name, "gateways that start do not find it", does=value == 1)
    for value in store.vector("stepwell_idempotent_sharing").values():
        without = "each gateway stores them only for itself"
        add("answers to idempotency keys", without, does=value == 1)
    return [
        {"name": name, "works": does, "without": without} for (name, without), does in works.items()
    ]


def _alert(alert: Alert) -> Document:
    return {
        "name": alert.rule.name,
        "severity": alert.rule.labels.get("severity", ""),
        "summary": alert.text("summary"),
        "description": alert.text("description"),
        "runbook_url": alert.text("runbook_url"),
        "labels": dict(alert.labels),
        "began_unix_seconds": alert.fired,
        "ended_unix_seconds": alert.ended,
    }


def _tenants(store: SeriesStore) -> Iterator[Document]:
    """Yields the tenants, those with the most tokens in the last minute first."""
    tokens = _sums(store.gained("stepwell_tenant_tokens_total", MINUTE), "tenant")
    refused = _sums(store.gained("stepwell_tenant_refusals_total", LISTED_SECONDS), "tenant")
    running = _sums(store.vector("stepwell_tenant_num_running"), "tenant")
    waiting = _sums(store.vector("stepwell_tenant_num_waiting"), "tenant")
    total = sum(tokens.values())
    names = {*tokens, *refused, *running, *waiting} - {""}
    for name in sorted(names, key=lambda one: (-tokens.get(one, 0), one)):
        yield {
            "tenant": name,
            "num_running": running.get(name, 0),
            "num_waiting": waiting.get(name, 0),
            "num_tokens_of_minute": tokens.get(name, 0),
            "share_of_minute": tokens.get(name, 0) / total if total else 0.0,
            "num_refused_of_hour": refused.get(name, 0),
        }


def _refusals(store: SeriesStore) -> list[Document]:
    """Lists why requests were refused in the last hour, with the most frequent reason first."""
    name = "vllm:admission_rejections_total"
    of_hour = _sums(store.gained(name, LISTED_SECONDS), "reason")
    of_minute = _sums(store.gained(name, MINUTE), "reason")
    return [
        {"reason": reason, "num_of_minute": of_minute.get(reason, 0), "num_of_hour": number}
        for reason, number in sorted(of_hour.items(), key=lambda one: -one[1])
        if number
    ]


def _processes(store: SeriesStore) -> list[Document]:
    """Lists the gateway's process, then each replica's processes, with their certificates."""
    releases = {_process(labels): dict(labels) for labels in store.vector("stepwell_build_info")}
    certificates: dict[tuple[str, ...], list[Document]] = {}
    left = store.vector("stepwell_tls_certificate_seconds_left")
    for labels, seconds in sorted(left.items(), key=lambda one: one[1]):
        one = {"certificate": dict(labels).get("certificate", ""), "seconds_left": seconds}
        certificates.setdefault(_process(labels), []).append(one)
    listed = []
    for labels, started in store.vector("process_start_time_seconds").items():
        process, named = _process(labels), dict(labels)
        release = releases.get(process, {})
        listed.append(
            {
                "service": named.get("service", ""),
                "model_name": named.get("model_name") if "engine" in named else None,
                "replica": named.get("engine", ""),
                "instance": named["instance"],
                "rank": named.get("rank"),
                "version": release.get("version"),
                "protocol": release.get("protocol"),
                "started_unix_seconds": started,
                "certificates": certificates.get(process, []),
            }
        )
    return sorted(listed, key=_place)


def _process(labels: Labels) -> tuple[str, ...]:
    """Returns what identifies a process among the labels of a metric."""
    named = dict(labels)
    return tuple(named.get(label, "") for label in ("instance", "service", "rank"))


def _place(process: Document) -> tuple[bool, str, str, int, int, str]:
    rank = process["rank"] or ""
    service = _SERVICES.get(process["service"], len(_SERVICES))
    model = process["model_name"]
    return model is not None, model or "", process["instance"], service, len(rank), rank


def _sums(vector: Vector, label: str) -> dict[str, float]:
    """Sums the values of all series that have the same value of a label. Tokens of cached prompts
    are subtracted, because tokens of prompts include them.
    """
    sums: dict[str, float] = {}
    for labels, value in vector.items():
        named = dict(labels)
        sign = -1 if named.get("kind") == "cached" else 1
        name = named.get(label, "")
        sums[name] = sums.get(name, 0.0) + sign * value
    return sums
