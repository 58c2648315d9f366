"""Names, explains and formats the parts of a request's time. The sum of all parts is that time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.telemetry import names

PREFILL, DECODE, GATEWAY = "prefill", "decode", "gateway"
CLIENT, QUEUE, MOVED, BLOCKS, RECOVERY = "client", "queue", "moved", "blocks", "recovery"
OTHER = "other"

EXPLANATIONS: Mapping[str, str] = {
    "limits": "The gateway checked the tenant's limits in Redis.",
    "retry": "The gateway looked for an earlier request with the same idempotency key.",
    "no_replica": "No replica was ready.",
    "replica_slots": "Each replica had as many requests as it may run.",
    "share": "The free slots were reserved for tenants that had less than their share.",
    "turn": "Other requests of the same tenant were first in the tenant's queue.",
    "resubmit": "The request had left a replica that did not finish it, and waited for another.",
    QUEUE: "The request waited in the queue of a replica that did not report the reasons.",
    "slots": "The replica already ran max_num_seqs requests.",
    BLOCKS: "The KV cache had too few free blocks, or the request was preempted.",
    "budget": "Other requests used the whole token budget of each step (max_num_batched_tokens).",
    "interval": "Steps that compute prompts were delayed so that running requests decode evenly.",
    "adapters": "The request's LoRA adapter was loaded, or requests used all adapter slots.",
    "grammar": "The grammar of the request's structured output was compiled.",
    "encoder": "The encoder had no budget for an item of the prompt.",
    "kv_load": "Keys and values of the prompt were loaded from host memory or another store.",
    "session": "The client's session waited for the input of its next turn.",
    "hashing": "The blocks of the prompt were hashed.",
    "step": "The request waited until the scheduler planned the next step.",
    "fault_search": "Only few requests ran at once, to find the request whose steps always fail.",
    "pause": "An operator had paused the engine.",
    RECOVERY: "The replica had lost its kvpool or its workers, and recovered.",
    MOVED: "The request was at a replica that did not finish it; tokens generated there are kept.",
    PREFILL: "The prompt was computed, also again after a preemption or a loss.",
    DECODE: "The output was generated.",
    OTHER: "Merged phases of a request with too many phases.",
    CLIENT: "The client sent the request's body, or read the rest of the answer.",
    GATEWAY: "The gateway tokenized, checked and routed the request, and sent the answer.",
}
"""Maps the name of each part to its explanation, in the order of display."""

_OF_REASONS: Mapping[str, str] = {
    "max_seqs": "slots",
    "no_blocks": BLOCKS,
    "retained": BLOCKS,
    "headroom": BLOCKS,
    "prefill_interval": "interval",
    "held_back": "fault_search",
    "paused": "pause",
    "remote_kv": "kv_load",
    "output_in_flight": "step",
    "next_step": "step",
    "step_ahead": "step",
    "lost_step": RECOVERY,
    "no_slot": "replica_slots",
    "preempted": "resubmit",
    "idempotency_key": "retry",
    "body_budget": GATEWAY,
}
"""Maps a wait's reason to the name of the part to which the wait belongs, if the names differ."""

WAITS_FOR: Mapping[str, str] = {
    "budget": "the token budget of a step",
    "max_seqs": "max_num_seqs",
    "no_blocks": "blocks",
    "retained": "blocks of paused programs",
    "headroom": "blocks that stay free for running requests",
    "prefill_interval": "a step in which prompts are computed",
    "held_back": "the search for a request whose steps always fail",
    "paused": "the end of the operator's pause",
    "recovery": "the recovery of kvpool and workers",
    "adapters": "a slot for its LoRA adapter",
    "session": "the input of the session's next turn",
    "remote_kv": "keys and values to be loaded",
    "grammar": "its grammar to be compiled",
    "encoder": "the encoder",
    "output_in_flight": "the tokens of a step that began before its preemption",
    "no_slot": "a slot at a replica",
    "share": "a slot of its tenant's share",
    "turn": "earlier requests of its tenant",
    "preempted": "a slot, since its first slot was given to another tenant",
    "no_replica": "a ready replica",
}
"""Maps a wait's reason to a description for displays of what the request waits for."""


@dataclass(frozen=True, slots=True)
class TimePart:
    name: str
    nanos: int
    request_id: str = ""
    """Id of the request that blocked this request in the part's longest wait, or empty."""
    step: int | None = None
    """Number of the step in which the part's longest wait began. None if no step is known."""

    @property
    def seconds(self) -> float:
        return self.nanos / 1e9

    def plus(self, other: "TimePart") -> "TimePart":
        """The sum of both parts, with `request_id` and `step` of the longer part."""
        longer = self if self.nanos >= other.nanos else other
        return TimePart(self.name, self.nanos + other.nanos, longer.request_id, longer.step)


def part_of_reason(reason: str) -> str:
    name = _OF_REASONS.get(reason, reason)
    return name if name in EXPLANATIONS else OTHER


def added_up(parts: Sequence[TimePart]) -> tuple[TimePart, ...]:
    """Adds up parts with equal names. Omits empty parts. Sorts parts as in EXPLANATIONS."""
    sums: dict[str, TimePart] = {}
    for part in parts:
        before = sums.get(part.name)
        sums[part.name] = part if before is None else before.plus(part)
    return tuple(sums[name] for name in EXPLANATIONS if name in sums and sums[name].nanos > 0)


def time_line(parts: Sequence[TimePart]) -> str:
    """Formats parts as a line like "12.6 s = slots 4.9 · prefill 0.9 · decode 6.0 · gateway 0.8".
    The numbers are rounded so that their sum is the rounded total. Parts of zero are omitted.
    """
    whole = sum(part.nanos for part in parts)
    unit, name, digits = _unit(whole)
    shown = _rounded([part.nanos for part in parts], unit)
    terms = [
        f"{part.name} {number / 10**digits:.{digits}f}"
        for part, number in zip(parts, shown, strict=True)
        if number
    ]
    return f"{sum(shown) / 10**digits:.{digits}f} {name} = {' · '.join(terms) or 'nothing'}"


def time_attributes(parts: Sequence[TimePart]) -> dict[str, str | int | float]:
    """The span attributes that represent these parts."""
    attributes: dict[str, str | int | float] = {names.ATTR_TIME: time_line(parts)}
    for part in parts:
        name = f"{names.ATTR_TIME}.{part.name}"
        attributes[name] = part.seconds
        if part.request_id:
            attributes[f"{name}.request_id"] = part.request_id
        if part.step is not None:
            attributes[f"{name}.step"] = part.step
    return attributes


def parts_of_attributes(attributes: Mapping[str, Any]) -> tuple[TimePart, ...]:
    """The inverse of `time_attributes`. Empty if the attributes have no parts."""
    parts = []
    for name in EXPLANATIONS:
        key = f"{names.ATTR_TIME}.{name}"
        seconds, step = attributes.get(key), attributes.get(f"{key}.step")
        if seconds is not None:
            request_id = attributes.get(f"{key}.request_id", "")
            parts.append(TimePart(name, round(seconds * 1e9), request_id, step))
    return tuple(parts)


def _unit(nanos: int) -> tuple[int, str, int]:
    """How a time is formatted: its last digit in nanoseconds, its unit, its number of decimals."""
    if nanos >= 950_000_000:
        return 100_000_000, "s", 1
    if nanos >= 9_500_000:
        return 1_000_000, "ms", 0
    return 100_000, "ms", 1


def _rounded(numbers: Sequence[int], unit: int) -> list[int]:
    """Divides numbers by `unit` and rounds them so that they add up to the rounded sum."""
    shown = [number // unit for number in numbers]
    missing = (sum(numbers) + unit // 2) // unit - sum(shown)
    by_rest = sorted(range(len(numbers)), key=lambda index: -(numbers[index] % unit))
    for index in by_rest[:missing]:
        shown[index] += 1
    return shown
