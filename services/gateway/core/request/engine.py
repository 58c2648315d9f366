"""The interfaces through which a generation uses the fleet, or another source of output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.core.caller import Caller
from services.gateway.core.fleet.routing_decision import RoutingDecision
from services.gateway.core.fleet.sequence_trace import SequenceTrace
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.wait import Wait


class DeltaSource(Protocol):
    """The output of a request's sequences."""

    routes: list[RoutingDecision]
    """The routes of the sequences in the order of sending."""
    waits: list[Wait]
    """The waits of sequences that were not sent to a replica at once, or were preempted."""
    traces: list[SequenceTrace]
    """The trace of each sequence. The list is empty if another gateway runs the sequences."""

    def take(self) -> list[tuple[int, Delta]]:
        """Returns the output since the last call as pairs of a sequence's index and its delta. Each
        index occurs at most once.
        """

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news` when there is new output. Replaces an earlier callback. After a
        sequence's first tokens, a source may wait until it has `min_tokens` new tokens.
        """

    def abort(self, index: int) -> None:
        """Ends this sequence, because a stop string was found. Idempotent."""

    def end_turn(self, index: int, tool: str) -> None:
        """Notes which tool the client runs after the answer of an ended sequence. A source may
        ignore it.
        """

    def close(self) -> None:
        """Ends all sequences and their output. Idempotent."""


class Source(Protocol):
    """A source of deltas: an engine that generates them, or a recording."""

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Starts sequences. Returns their output from the beginning."""


@dataclass(frozen=True, slots=True)
class Made:
    """The number of an answer's tokens that were generated so far, and the numbers of prompt tokens
    that were found in the cache.
    """

    num_tokens: int
    """Number of generated tokens of all sequences."""
    num_cached_tokens: tuple[int | None, ...]
    """Number of cached prompt tokens of each sequence. It is None for a sequence that was not
    scheduled.
    """


class KeptSource(Source, Protocol):
    """A source that may continue after its reader has left."""

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        """Calls `call` once when the answer has ended or stopped. If the answer is not being
        generated, calls it at once.
        """


class Engine(Source, Protocol):
    """All replicas of the model as one engine."""

    def limits(self) -> ModelLimits:
        """Returns the limits of a request. Raises Unavailable if no replica has been ready so
        far.
        """

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        """Raises ResourceExhausted if a request of the caller would be refused now, and
        DeadlineExceeded if the request would not end by its deadline.

        The result is an estimate. The scheduler decides after `start`.
        """

    def arriving(self, caller: Caller, deadline: float | None) -> Arrival:
        """Checks for room like `check_room`, and raises the same errors. Counts the request until
        `end` is called on the returned Arrival. The caller calls `start` next.
        """

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Sends sequences to a replica. While no replica is ready, the sequences wait in order of
        arrival.

        If a replica is lost, its sequences are sent to another one with the tokens that they have
        generated. No token is lost or repeated in their deltas.
        """
