"""Divides the time of a call into parts, for spans and for clients that set `include_metrics`."""

from collections.abc import Sequence
from typing import Any

from services.common.telemetry.time_parts import TimePart, time_line
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.request.generation import Generation
from services.gateway.core.traces.sequence_trace import EngineTimes, SequenceTrace
from services.gateway.core.traces.time_parts import EngineParts, request_parts


def traces_of(generation: Generation | None) -> Sequence[SequenceTrace]:
    if generation is None or generation.mailbox is None or generation.is_replay:
        return ()
    return generation.mailbox.traces


def engine_times(traces: Sequence[SequenceTrace]) -> EngineTimes | None:
    """Returns the times of the sequence (one answer) that took longest at its last replica."""
    known = [trace.times for trace in traces if trace.times is not None]
    return max(known, key=lambda times: times.queue + times.inference, default=None)


def parts_of(
    record: RequestRecord, until: int | None = None, so_far: EngineParts | None = None
) -> tuple[TimePart, ...]:
    """Returns the parts of a call's time up to its end, or up to `until` if the call has not ended.
    If `until` is None, it is the current time.
    """
    end = record.timeline.now() if until is None else until
    return request_parts(record.timeline, traces_of(record.generation), end, so_far)


def metrics_body(record: RequestRecord) -> dict[str, Any]:
    """Returns the request's times for the client: the parts up to now, and vLLM's request
    statistics in milliseconds.

    The statistics are null if the replica did not report them, for example after a stop string, or
    if the request has several answers, because they describe a single answer.
    """
    parts, traces = parts_of(record), traces_of(record.generation)
    body: dict[str, Any] = {
        "line": time_line(parts),
        "seconds": sum(part.nanos for part in parts) / 1e9,
        "parts": {part.name: part.seconds for part in parts},
    }
    times = traces[0].times if len(traces) == 1 else None
    num_tokens = 0 if record.generation is None else record.generation.usage().num_generated_tokens
    is_timed = times is not None and num_tokens > 1 and times.decode > 0
    return body | {
        "queue_time_ms": None if times is None else 1000 * times.queue,
        "time_to_first_token_ms": None if times is None else 1000 * times.prefill,
        "generation_time_ms": None if times is None else 1000 * times.decode,
        "mean_itl_ms": 1000 * times.decode / (num_tokens - 1) if times and is_timed else None,
        "tokens_per_second": num_tokens / times.inference if times and is_timed else None,
    }
