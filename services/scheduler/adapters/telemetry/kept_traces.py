"""Timelines of requests that have ended and were not sampled, in case their spans are wanted."""

from collections import OrderedDict
from dataclasses import dataclass

from services.scheduler.adapters.telemetry.request_spans import Attributes
from services.scheduler.core.timelines.timeline import Timeline

MAX_KEPT = 2048
"""Requests; a timeline takes some kilobytes."""


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """What becomes the spans of one request."""

    timeline: Timeline
    attributes: Attributes
    failed: bool


class KeptTraces:
    """The newest timelines by request id. Each can be taken once."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._traces: OrderedDict[str, KeptTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, request_id: str, trace: KeptTrace) -> None:
        """Keeps a timeline, in place of the oldest one if there are too many."""
        self._traces.pop(request_id, None)
        self._traces[request_id] = trace
        if len(self._traces) > self._most:
            self._traces.popitem(last=False)

    def take(self, request_id: str) -> KeptTrace | None:
        """The timeline of a request; None if it is not kept."""
        return self._traces.pop(request_id, None)
