"""Divides the time of a request at the gateway, from its arrival to its end, into parts.

These are the parts of the request's timeline, except for the part GENERATE, in which replicas
process the request's sequences (the prompt and one answer each). GENERATE is replaced by the parts
of the sequence that ended last: the sequence's waits at the gateway, and the times that its last
replica reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from services.common.telemetry import names
from services.common.telemetry.time_parts import (
    CLIENT,
    DECODE,
    GATEWAY,
    MOVED,
    PREFILL,
    QUEUE,
    TimePart,
    added_up,
    part_of_reason,
)
from services.gateway.core.traces.sequence_trace import SequenceTrace
from services.gateway.core.traces.timeline import Part, Stretch, Timeline

EngineParts = Mapping[str, Sequence[TimePart]]
"""Maps the id of each sequence to the time parts that its current replica has reported so far."""

_NAMES = {Part.READ: CLIENT, Part.WRITE: CLIENT, Part.RESUBMIT: "resubmit"}
"""The names of parts in which the gateway itself does no work. The name of the part WAIT depends on
the reason of the wait.
"""


def request_parts(
    timeline: Timeline, traces: Sequence[SequenceTrace], now: int, so_far: EngineParts | None = None
) -> tuple[TimePart, ...]:
    """Returns the parts of a request's time up to the request's end, or up to `now` while the
    request runs. The parts add up to the whole time. `so_far` has the parts of sequences that are
    still at a replica.
    """
    last = max(traces, key=lambda trace: trace.timeline.ended or now, default=None)
    parts: list[TimePart] = []
    for stretch, began, ended in _stretches(timeline, now):
        if stretch.part is Part.GENERATE and last is not None:
            parts += _sequence_parts(last, began, ended, so_far or {})
        else:
            parts.append(TimePart(_name(stretch), ended - began))
    return added_up(parts)


def _sequence_parts(
    trace: SequenceTrace, began: int, ended: int, so_far: EngineParts
) -> list[TimePart]:
    """Returns the parts of a sequence's time from `began` to `ended`. The part GATEWAY has all time
    that the sequence's timeline does not cover.
    """
    parts: list[TimePart] = []
    num_sent = 0
    for stretch, first, last in _stretches(trace.timeline, ended):
        start, end = max(began, first), min(ended, last)
        if end <= start:
            num_sent += stretch.part is Part.ENGINE
            continue
        if stretch.part is not Part.ENGINE:
            parts.append(TimePart(_name(stretch), end - start))
            continue
        num_sent += 1
        if num_sent < trace.num_sent:
            parts.append(TimePart(MOVED, end - start))
        else:
            parts += _stay_parts(trace, start, end, so_far.get(trace.request_id, ()))
    rest = ended - began - sum(part.nanos for part in parts)
    return [*parts, TimePart(GATEWAY, rest)]


def _stay_parts(
    trace: SequenceTrace, start: int, end: int, so_far: Sequence[TimePart]
) -> list[TimePart]:
    """Returns the parts of a sequence's last stay at a replica, from `start` to `end`. If the
    replica has reported no parts, they are estimated from the times at which the gateway received
    the sequence's first messages from the replica.
    """
    reported = so_far if trace.times is None else trace.times.parts
    if not reported:
        admitted = end if trace.admitted is None else min(max(trace.admitted, start), end)
        first = end if trace.first_token is None else min(max(trace.first_token, admitted), end)
        return [
            TimePart(QUEUE, admitted - start),
            TimePart(PREFILL, first - admitted),
            TimePart(DECODE, end - first),
        ]
    left, parts = end - start, []
    for part in reported:  # The clocks differ, so the replica's parts are cut at `end`.
        length = min(part.nanos, left)
        left -= length
        parts.append(TimePart(part.name, length, part.request_id, part.step))
    return parts


def _name(stretch: Stretch) -> str:
    if stretch.part is Part.WAIT:
        return part_of_reason(str((stretch.details or {}).get(names.ATTR_WAIT_REASON, "")))
    return _NAMES.get(stretch.part, GATEWAY)


def _stretches(timeline: Timeline, now: int) -> Iterator[tuple[Stretch, int, int]]:
    for one, following in pairwise(timeline.stretches):
        yield one, one.began, following.began
    last = timeline.stretches[-1]
    yield last, last.began, max(last.began, timeline.ended or now)
