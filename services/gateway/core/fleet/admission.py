"""Decides when the gateway sends a new sequence (the prompt and one answer) to a replica."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.gateway.core.caller import Caller
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision


@dataclass(frozen=True, slots=True)
class Queued:
    """A sequence that waits at this gateway, with the reason of the wait, and the seconds waited so
    far, or None if they are not known.
    """

    inflight: Inflight
    reason: str
    seconds: float | None = None


class Admission:
    """Lets every sequence be sent at once. The option `tenants` uses a subclass that queues
    sequences. The fleet calls `discard`, `candidates`, `sent`, `started` and `left` for all
    sequences, even if they were not queued.
    """

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Inflight]:
        """Iterates over a copy of the queued sequences."""
        return iter(())

    def queued(self) -> Iterable[Queued]:
        return ()

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        """Raises ResourceExhausted if a request of the caller would be refused now, and
        DeadlineExceeded if the request would not end by `deadline`. `deadline` is in seconds on the
        event loop's clock.
        """

    def add(self, inflight: Inflight) -> None:
        """Queues a sequence for which `queues` is true."""
        raise NotImplementedError

    def queues(self, _inflight: Inflight) -> bool:
        """Whether the sequence must be queued before it is sent."""
        return False

    def discard(self, inflight: Inflight) -> None:
        """Removes a sequence from its queue. Does nothing if the sequence is not queued."""

    def candidates(self, _inflight: Inflight, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Returns the replicas to which the sequence may be sent. There is at least one."""
        return replicas

    def sent(self, inflight: Inflight, route: RoutingDecision) -> None:
        """Called when a sequence was sent to a replica."""

    def started(self, inflight: Inflight) -> None:
        """Called when a replica has scheduled a sequence for the first time."""

    def left(self, inflight: Inflight) -> None:
        """Called when a sequence has ended at its replica or was lost."""

    def admit(self) -> None:
        """Called when replicas may have room for queued sequences."""
