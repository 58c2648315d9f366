"""What W3C has go along with a request besides its `traceparent`, and what spans show of it."""

from dataclasses import dataclass
from urllib.parse import unquote

MAX_BAGGAGE_CHARACTERS = 8192
"""More is not passed on, as W3C allows."""
_MAX_ENTRIES, _MAX_SHOWN_CHARACTERS = 16, 256


@dataclass(frozen=True, slots=True)
class TraceHeaders:
    """`traceparent` is empty where the request is not sampled; the others where there is none."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""


UNTRACED = TraceHeaders()


def passed_on(baggage: str) -> str:
    """The header as it goes on to other services: empty if it is too long."""
    return baggage if len(baggage) <= MAX_BAGGAGE_CHARACTERS else ""


def baggage_attributes(baggage: str) -> dict[str, str]:
    """Entries of the header as attributes of a span, `baggage.KEY`; entries that are none are left
    out, and so is what is beyond 16 of them, or beyond 256 characters of one.
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
