"""The W3C trace context in messages between services, and the ids of new spans."""

import random
import re

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

_TRACEPARENT = re.compile(
    "(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})"
    "-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
"""Matches a `traceparent`. Versions after 00 may have additional fields at the end."""
_MAX_TRACESTATE_CHARACTERS = 512
"""A longer `tracestate` is dropped, as W3C permits."""


def new_trace_id() -> int:
    """A random trace id of 128 bits, which is not 0."""
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    """A random span id of 64 bits, which is not 0."""
    return random.getrandbits(64) or 1


def traceparent_text(trace_id: int, span_id: int) -> str:
    """The `traceparent` of a sampled span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def numbered_span_id(span_id: int, number: int) -> int:
    """The id of a span's child `number`, from 1. Sender and receiver compute the same id."""
    return (span_id + number) % 2**64 or 1


def numbered_traceparent(traceparent: str, number: int) -> str:
    """The `traceparent` of a span's child number `number`. Empty if `traceparent` is empty."""
    if not traceparent:
        return ""
    head, trace_id, span_id, flags = traceparent.split("-")
    return f"{head}-{trace_id}-{numbered_span_id(int(span_id, 16), number):016x}-{flags}"


def child_of(parent: SpanContext) -> SpanContext:
    """Creates the context of a new child span of the sampled span `parent`."""
    return SpanContext(
        parent.trace_id, new_span_id(), False, parent.trace_flags, parent.trace_state
    )


def sampled_parent(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Parses a `traceparent`. Returns None if it is empty, malformed, or not sampled."""
    parent = parse_traceparent(traceparent, tracestate)
    return parent if parent is not None and parent.trace_flags.sampled else None


def parse_traceparent(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Parses `traceparent` and `tracestate`, or returns None if `traceparent` is malformed."""
    if not traceparent:
        return None
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return None
    context = SpanContext(
        int(match["trace_id"], 16),
        int(match["span_id"], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match["flags"], 16) & TraceFlags.SAMPLED),
        trace_state=_trace_state(tracestate),
    )
    return context if context.is_valid else None


def _trace_state(tracestate: str) -> TraceState | None:
    if not tracestate or len(tracestate) > _MAX_TRACESTATE_CHARACTERS:
        return None
    return TraceState.from_header([tracestate])
