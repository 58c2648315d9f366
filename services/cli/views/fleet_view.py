"""Formats the gateway's /status answer as rows for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_STATE_PREFIX = "ENGINE_STATE_"
_WAIT_PREFIX = "WAIT_REASON_"
_WAITS_FOR = {
    "BUDGET": "tokens of a step",
    "MAX_SEQS": "max_num_seqs",
    "NO_BLOCKS": "blocks",
    "PAUSED": "the end of a pause",
    "HELD_BACK": "a search for a request that breaks its steps",
    "ADAPTERS": "a place for its adapter",
    "GRAMMAR": "its grammar to be compiled",
    "ENCODER": "the encoder",
    "RECOVERY": "pool and workers",
    "NO_PLACE": "a place at a replica",
    "SHARE": "its tenant's share",
    "TURN": "others of its tenant",
    "NO_REPLICA": "a replica that is ready",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of /status and its arrival time."""

    status: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as labelled rows. `problem` is the reason why it cannot serve, or empty. `state` is
    one word, such as running or paused, the same as on /ui and in `stepwell top`.
    """

    address: str
    problem: str
    state: str
    rows: tuple[tuple[str, str], ...]


def headline(sample: Sample) -> str:
    """The gateway's model and load in one line."""
    status = sample.status
    draining = ", draining" if status["draining"] else ""
    return f"{status['model']}: {_count(status['requests_in_flight'], 'request')} here{draining}"


def replica_views(sample: Sample, before: Sample | None) -> list[ReplicaView]:
    """Views of all replicas. Rates per second are included if there is an earlier sample."""
    earlier = {} if before is None else {r["address"]: r for r in before.status["replicas"]}
    return [
        ReplicaView(
            address=replica["address"],
            problem="" if replica["ready"] else replica["reason"] or "not ready",
            state=replica_state(replica),
            rows=_rows(replica["stats"], _rates(replica, earlier, sample, before)),
        )
        for replica in sample.status["replicas"]
    ]


def replica_state(replica: Mapping[str, Any]) -> str:
    """The state of a replica in one or two words, or the reason why it cannot serve."""
    stats = replica["stats"]
    if not replica["ready"] or stats is None:
        return replica["reason"] or ("not ready" if not replica["ready"] else "ready")
    names = [str(stats["state"].removeprefix(_STATE_PREFIX).lower())]
    if stats.get("paused") and names[0] != "paused":
        names.append("pausing")
    if stats.get("drained"):
        names.append("drained")
    return ", ".join(names)


def _rates(
    replica: dict[str, Any], earlier: dict[str, Any], sample: Sample, before: Sample | None
) -> dict[str, float]:
    """The growth of each total per second. Empty after a restart, because totals restart at 0."""
    new = replica["stats"]
    old = earlier.get(replica["address"], {}).get("stats")
    if before is None or new is None or old is None or old["incarnation"] != new["incarnation"]:
        return {}
    seconds = max(sample.seconds - before.seconds, 1e-6)
    return {
        name: (value - old[name]) / seconds for name, value in new.items() if type(value) is int
    }


def _rows(stats: dict[str, Any] | None, rates: dict[str, float]) -> tuple[tuple[str, str], ...]:
    if stats is None:
        return ()
    usable, free = stats["num_usable_blocks"], stats["num_free_blocks"]
    reason = stats["state_reason"]
    return (
        *((("state for", reason),) if reason else ()),
        ("running", f"{stats['num_running']} of {stats['max_num_seqs']}"),
        ("waiting", str(stats["num_waiting"]) + _why(stats["wait_reason"])),
        ("blocks", f"{_share(usable - free, usable)} used, {stats['block_size']} tokens each"),
        (
            "prefix hits",
            f"{_share(stats['num_cached_tokens'], stats['num_prompt_tokens'])} prompt tokens",
        ),
        ("generated", f"{stats['num_generated_tokens']} tokens{_rate(rates)}"),
        ("preemptions", f"{stats['num_preemptions']}, {stats['num_lost_tokens']} tokens given up"),
        ("steps", f"{stats['num_steps']}, {stats['mean_step_nanos'] / 1e6:.1f} ms each"),
        ("finished", _count(stats["num_finished"], "request")),
    )


def _why(reason: str) -> str:
    """The reasons why requests wait; empty if none waits."""
    name = reason.removeprefix(_WAIT_PREFIX)
    return "" if name == "UNSPECIFIED" else f" for {waits_for(name)}"


def waits_for(name: str) -> str:
    """The explanation of a wait reason such as NO_BLOCKS. An unknown reason is returned
    unchanged.
    """
    return _WAITS_FOR.get(name.upper(), name.lower().replace("_", " "))


def _rate(rates: dict[str, float]) -> str:
    return f", {rates['num_generated_tokens']:.1f} per second" if rates else ""


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
