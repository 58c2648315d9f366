"""Records the statistics of the last minutes: latencies, rates, queues, KV-cache pools and events.

A History has at most MAX_BINS bins of BIN_SECONDS seconds, MAX_VALUES latencies of each kind per
bin, and MAX_EVENTS events. Times are in seconds since 1970.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import quantiles

BIN_SECONDS = 10
MAX_BINS = 90
MAX_VALUES = 512
MAX_EVENTS = 100


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's status at one time. `incarnation` identifies the scheduler's process. It is empty
    if the scheduler did not respond.
    """

    name: str
    is_ready: bool
    reason: str = ""
    incarnation: str = ""
    is_paused: bool = False
    is_drained: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_held_blocks: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class Event:
    """An event for operators. Equal events within BIN_SECONDS seconds are merged and counted."""

    unix_seconds: float
    kind: str
    replica: str
    text: str
    count: int = 1


@dataclass(slots=True)
class Bin:
    """The statistics of one interval of BIN_SECONDS seconds."""

    began: int
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_ended: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    held_share: float = 0.0
    """Fraction of the KV blocks of all pools that are in use."""


class History:
    """The bins and events, from the oldest to the newest."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque(maxlen=MAX_BINS)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._statuses: Mapping[str, ReplicaStatus] = {}
        self._were_ready: set[str] = set()

    def bins(self, now: float) -> list[Bin]:
        """Returns all bins up to the current bin."""
        self._bin(now)
        return list(self._bins)

    def events(self) -> list[Event]:
        return list(self._events)

    def answered(
        self, now: float, whole: float, first_token: float | None, num_tokens: int, *, failed: bool
    ) -> None:
        """Records the end of a request that a replica had scheduled. `whole` and `first_token` are
        the seconds from the request's arrival to its end and to its first token.
        """
        one = self._bin(now)
        one.num_ended += 1
        one.num_tokens += num_tokens
        one.num_failed += failed
        if failed:
            self._note(now, "failed", "", "a request failed")
        if first_token is None or len(one.whole) == MAX_VALUES:
            return
        one.whole.append(whole)
        one.first_token.append(first_token)
        if num_tokens > 1:
            one.per_token.append((whole - first_token) / (num_tokens - 1))

    def refused(self, now: float, reason: str) -> None:
        self._bin(now).num_refused += 1
        self._note(now, "refused", "", reason.replace("_", " "))

    def sampled(self, now: float, statuses: Mapping[str, ReplicaStatus], num_queued: int) -> None:
        """Records a sample of the replicas. `statuses` maps addresses to statuses. `num_queued` is
        the number of sequences that wait at the gateway.
        """
        one = self._bin(now)
        one.num_running = sum(status.num_running for status in statuses.values())
        one.num_waiting = num_queued + sum(status.num_waiting for status in statuses.values())
        num_blocks = sum(status.num_blocks for status in statuses.values())
        num_held = sum(status.num_held_blocks for status in statuses.values())
        one.held_share = num_held / num_blocks if num_blocks else 0.0
        for address, status in statuses.items():
            before = self._statuses.get(address)
            is_first = status.is_ready and address not in self._were_ready
            if is_first:
                self._were_ready.add(address)
                self._note(now, "ready", status.name, "accepts requests")
            elif before is not None:
                for kind, text in changes(before, status):
                    self._note(now, kind, status.name, text)
        self._were_ready &= statuses.keys()
        self._statuses = dict(statuses)

    def _bin(self, now: float) -> Bin:
        """Returns the current bin. If it does not exist, adds it and the missing bins before it.
        New bins start with the previous bin's queues and pools, which the next sample replaces. If
        the clock was set back, removes the bins that are in the future.
        """
        began = int(now // BIN_SECONDS) * BIN_SECONDS
        while self._bins and self._bins[-1].began > began:
            self._bins.pop()
        if not self._bins or began - self._bins[-1].began > MAX_BINS * BIN_SECONDS:
            self._bins.append(Bin(began))
        while (last := self._bins[-1]).began < began:
            following = Bin(last.began + BIN_SECONDS)
            following.num_running, following.num_waiting = last.num_running, last.num_waiting
            following.held_share = last.held_share
            self._bins.append(following)
        return self._bins[-1]

    def _note(self, now: float, kind: str, replica: str, text: str) -> None:
        for event in reversed(self._events):
            if not now - BIN_SECONDS <= event.unix_seconds <= now:
                break
            if (event.kind, event.replica, event.text) == (kind, replica, text):
                event.count += 1
                return
        self._events.append(Event(now, kind, replica, text))


def changes(before: ReplicaStatus, after: ReplicaStatus) -> Iterator[tuple[str, str]]:
    """Yields the changes of a replica's status, each as a kind of event and a text. The state of a
    scheduler that does not respond is unknown, and counts as unchanged.
    """
    if before.is_ready and not after.is_ready:
        yield "lost", after.reason or "cannot run steps"
    elif after.is_ready and not before.is_ready:
        yield "recovered", "accepts requests again"
    if not (before.incarnation and after.incarnation):
        return
    if before.incarnation != after.incarnation:
        yield "restarted", "the scheduler was restarted"
    if after.is_paused != before.is_paused:
        yield ("paused", "by an operator") if after.is_paused else ("resumed", "by an operator")
    if after.is_drained != before.is_drained:
        yield ("drained" if after.is_drained else "undrained"), "by an operator"


def median_and_p99(values: list[float]) -> tuple[float, float] | None:
    """Returns the median and the 99th percentile, or None if there are no values."""
    if len(values) < 2:
        return (values[0], values[0]) if values else None
    hundredths = quantiles(values, n=100, method="inclusive")
    return hundredths[49], hundredths[98]
