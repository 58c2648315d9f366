"""The W3C headers `tracestate` and `baggage`, which services forward besides `traceparent`."""

from dataclasses import dataclass
from urllib.parse import unquote

MAX_BAGGAGE_CHARACTERS = 8192
"""A longer baggage header is dropped, as W3C permits."""
_MAX_ENTRIES, _MAX_SHOWN_CHARACTERS = 16, 256


@dataclass(frozen=True, slots=True)
class TraceHeaders:
    """A request's trace headers, empty if absent. `traceparent` is also empty if not sampled."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""


UNTRACED = TraceHeaders()


def passed_on(baggage: str) -> str:
    """The baggage header that is sent to other services, or empty text if it is too long."""
    return baggage if len(baggage) <= MAX_BAGGAGE_CHARACTERS else ""


def baggage_attributes(baggage: str) -> dict[str, str]:
    """The entries of the baggage header as span attributes `baggage.KEY`. Invalid entries are
    omitted. At most 16 entries with 256 characters each are kept.
    """
    attributes: dict[str, str] = {}
    for entry in baggage.split(",") if baggage else ():
        key, is_entry, value = entry.partition(";")[0].partition("=")
        key = key.strip()
        if not is_entry or not key:
            continue
        if len(attributes) == _MAX_ENTRIES:
            break
        shown = unquote(value.strip(), errors="replace")[:_MAX_SHOWN_CHARACTERS]
        attributes[f"baggage.{key[:_MAX_SHOWN_CHARACTERS]}"] = shown
    return attributes
