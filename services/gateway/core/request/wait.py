"""A sequence's wait for a place: its reason and duration."""

import enum
from dataclasses import dataclass

from services.gateway.options.tenants.core.queues.capacity import Capacity


class WaitReason(enum.Enum):
    """The reason for which a sequence had to wait when it was queued."""

    NO_PLACE = "no_place"
    """No replica had a free place."""
    SHARE = "share"
    """The free places were reserved for tenants below their shares, or the sequence's tenant had
    too many starting sequences.
    """
    TURN = "turn"
    """Other sequences of the same tenant waited before this sequence."""
    PREEMPTED = "preempted"
    """The sequence was preempted for a tenant below its share."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that has ended. Times are on the event loop's clock, in seconds."""

    reason: WaitReason
    began: float
    ended: float
    num_ahead: int
    """Number of the tenant's sequences that were already waiting when this sequence arrived."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """Returns the wait reason of a new sequence. `num_ahead` sequences of the same tenant wait
    before it.
    """
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_PLACE
