"""Formats the gateway's /status response as rows for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.cli.views.samples import Sample, replica_state, state_colour, waiting_text


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's data as rows with labels, the replica's state, and the state's colour."""

    address: str
    state: str
    colour: str
    rows: tuple[tuple[str, str], ...]


def headline(sample: Sample) -> str:
    """The gateway's model and load in one line."""
    status = sample.answer
    draining = ", draining" if status["draining"] else ""
    return f"{status['model']}: {_count(status['requests_in_flight'], 'request')} here{draining}"


def replica_views(sample: Sample, before: Sample | None) -> list[ReplicaView]:
    """Views of all replicas. If `before`, an earlier sample, is given, they include rates."""
    return [
        ReplicaView(
            address=replica["address"],
            state=replica_state(replica),
            colour=state_colour(replica),
            rows=_rows(replica["stats"], sample.rates(replica, before)),
        )
        for replica in sample.answer["replicas"]
    ]


def _rows(
    stats: Mapping[str, Any] | None, rates: Mapping[str, float]
) -> tuple[tuple[str, str], ...]:
    if stats is None:
        return ()
    usable, free = stats["num_usable_blocks"], stats["num_free_blocks"]
    reason = stats["state_reason"]
    return (
        *((("state for", reason),) if reason else ()),
        ("running", f"{stats['num_running']} of {stats['max_num_seqs']}"),
        ("waiting", waiting_text(stats)),
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


def _rate(rates: Mapping[str, float]) -> str:
    return f", {rates['num_generated_tokens']:.1f} per second" if rates else ""


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
