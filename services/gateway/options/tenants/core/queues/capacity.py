"""The number of slots for running sequences of all ready replicas, and how fast the replicas
complete requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from services.gateway.core.fleet.replica import Replica


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of slots of several replicas, and how fast the replicas complete requests."""

    num_slots: int
    num_free: int
    """Number of free slots. It is negative while sequences wait at the replicas."""
    seconds_per_request: float = 0.0
    """Mean seconds between two requests' ends while all slots are occupied, or 0 if unknown."""
    service_seconds: float = 0.0
    """Mean seconds from a request's first step to its end, or 0 if unknown."""


def capacity_of(replicas: Sequence[Replica]) -> Capacity | None:
    """Returns the capacity of replicas together, or None if there are no replicas, or if the number
    of slots of any replica is not known.

    A replica without measured times is assumed to complete as many requests per slot as the
    replicas with measured times.
    """
    num_slots, num_measured, rate = 0, 0, 0.0
    service_seconds: list[float] = []
    for replica in replicas:
        if replica.num_slots is None:
            return None
        num_slots += replica.num_slots
        queue = replica.queue
        if queue is not None and queue.seconds_per_request:
            num_measured += replica.num_slots
            rate += 1 / queue.seconds_per_request
            service_seconds.append(queue.service_seconds)
    if not num_slots:
        return None
    return Capacity(
        num_slots=num_slots,
        num_free=sum(replica.num_free_slots for replica in replicas),
        seconds_per_request=num_measured / (num_slots * rate) if rate else 0.0,
        service_seconds=fmean(service_seconds) if service_seconds else 0.0,
    )
