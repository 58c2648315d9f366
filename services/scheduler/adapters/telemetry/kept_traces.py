"""Stores timelines of ended, unsampled requests, because their spans may be requested later."""

from collections import OrderedDict
from dataclasses import dataclass

from services.scheduler.adapters.telemetry.request_spans import Attributes
from services.scheduler.core.timelines.timeline import Timeline

MAX_KEPT = 2048
"""Limit on the number of stored timelines. A timeline takes some kilobytes."""


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """The data from which the spans of one request are made."""

    timeline: Timeline
    attributes: Attributes
    failed: bool


class KeptTraces:
    """Maps the ids of recently ended requests to their timelines. `take` removes a timeline."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._traces: OrderedDict[str, KeptTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, request_id: str, trace: KeptTrace) -> None:
        """Stores a timeline. Drops the oldest one if there are too many."""
        self._traces.pop(request_id, None)
        self._traces[request_id] = trace
        if len(self._traces) > self._most:
            self._traces.popitem(last=False)

    def take(self, request_id: str) -> KeptTrace | None:
        """Removes and returns the timeline of a request. None if it is not stored."""
        return self._traces.pop(request_id, None)
