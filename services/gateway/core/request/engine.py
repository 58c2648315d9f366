"""The interfaces through which a generation (a client's request while it runs) uses the replicas or
another source of output. A request has one sequence for each of its answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.core.caller import Caller
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.wait import Wait
from services.gateway.core.routing_decision import RoutingDecision
from services.gateway.core.traces.sequence_trace import SequenceTrace


class DeltaSource(Protocol):
    """The output of a request's sequences."""

    routes: list[RoutingDecision]
    """The routing decision for each time that a sequence was sent to a replica, in this order."""
    waits: list[Wait]
    """The waits, which have ended, of sequences that were not sent at once or were preempted."""
    traces: list[SequenceTrace]
    """The trace of each sequence. The list is empty if another gateway runs the sequences."""

    def take(self) -> list[tuple[int, Delta]]:
        """Returns the output since the last call as pairs of a sequence's index and its delta. Each
        index occurs at most once.
        """

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Makes the source call `on_news` when there is new output. Replaces an earlier callback.
        For tokens after a sequence's first tokens, the source may delay the call until there are
        `min_tokens` new tokens.
        """

    def abort(self, index: int) -> None:
        """Ends a sequence because its text contains a stop string. Idempotent."""

    def end_turn(self, index: int, tool: str) -> None:
        """Reports which tool the client runs after an ended sequence, whose answer calls the tool.
        A source may ignore the report.
        """

    def close(self) -> None:
        """Ends all sequences. Idempotent."""


class Source(Protocol):
    """Makes DeltaSources: an engine that generates tokens, or a recorded answer."""

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Starts sequences. The returned source yields their output from the beginning."""


@dataclass(frozen=True, slots=True)
class Made:
    """The numbers of generated and cached tokens of a request so far."""

    num_tokens: int
    """Number of generated tokens of all sequences."""
    num_cached_tokens: tuple[int | None, ...]
    """Number of cached prompt tokens of each sequence, or None if it was not scheduled."""


class KeptSource(Source, Protocol):
    """A source that may continue to generate an answer after the answer's reader has left."""

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        """Calls `call` once: when the engine has stopped generating the answer, or immediately if
        the answer is not being generated.
        """


class Engine(Source, Protocol):
    """All replicas of the model as one engine."""

    def limits(self) -> ModelLimits:
        """Returns the limits of a request. Raises Unavailable if no replica was ready so far."""

    async def until_limits(self, on_wait: Callable[[str], None]) -> None:
        """Waits until a replica has been ready, at most as long as a sequence waits for a replica.
        After a wait in vain, `limits` raises Unavailable. Before a wait, calls `on_wait` with its
        reason.
        """

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        """Raises ResourceExhausted if a request of the caller would be refused now, and
        DeadlineExceeded if the request would not end by `deadline`.

        This check is an estimate. After `start`, the replica's scheduler decides.
        """

    def arriving(self, caller: Caller, deadline: float | None) -> Arrival:
        """Raises the errors of `check_room`, and otherwise counts the request as arriving until
        `end` of the returned Arrival is called. Call this method before `start`.
        """

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Sends each sequence to a replica. While no replica is ready, the sequences wait in order
        of arrival.

        If a replica is lost, its sequences and their generated tokens are sent to another replica,
        which continues them. The deltas neither lose nor repeat a token.
        """
