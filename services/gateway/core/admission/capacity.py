"""What all ready replicas can take together, and how fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from services.common.queue_state import QueueState


class Taker(Protocol):
    """A replica, as far as its capacity goes."""

    @property
    def num_places(self) -> int | None:
        """Sequences that it may have; None if it does not say."""

    @property
    def num_free_places(self) -> int:
        """Of those places, the free ones; less than 0 while sequences wait there."""

    @property
    def queue(self) -> QueueState | None:
        """Its queue, as it announced it last; None if it has not yet."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The places of several replicas, and the speed at which requests go through them."""

    num_places: int
    num_free: int
    """Less than 0 while sequences wait at the replicas."""
    seconds_per_request: float = 0.0
    """Time between the ends of two requests while all places are taken; 0: not known."""
    service_seconds: float = 0.0
    """Time from a request's admission to its end; 0: not known."""


def capacity_of(replicas: Sequence[Taker]) -> Capacity | None:
    """The capacity of replicas; None if there are none, or one does not say how much it takes.

    Those that have not measured their speed count as fast as the others, by their places.
    """
    num_places, num_measured, rate = 0, 0, 0.0
    service_seconds: list[float] = []
    for replica in replicas:
        if replica.num_places is None:
            return None
        num_places += replica.num_places
        queue = replica.queue
        if queue is not None and queue.seconds_per_request:
            num_measured += replica.num_places
            rate += 1 / queue.seconds_per_request
            service_seconds.append(queue.service_seconds)
    if not num_places:
        return None
    return Capacity(
        num_places=num_places,
        num_free=sum(replica.num_free_places for replica in replicas),
        seconds_per_request=num_measured / (num_places * rate) if rate else 0.0,
        service_seconds=fmean(service_seconds) if service_seconds else 0.0,
    )
