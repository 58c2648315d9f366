"""The wait of a sequence for a place: its reason and its time."""

import enum
from dataclasses import dataclass

from services.gateway.core.admission.capacity import Capacity


class WaitReason(enum.Enum):
    """Why a sequence had to wait when it was queued."""

    NO_PLACE = "no_place"
    """No place was free at any replica."""
    SHARE = "share"
    """The free places were reserved for tenants below their shares, or its tenant had as many
    starting sequences as it may.
    """
    TURN = "turn"
    """Other sequences of its tenant waited before it."""
    PREEMPTED = "preempted"
    """It was running, and its place went to a tenant below its share."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that has ended. Times are on the event loop's clock, in seconds."""

    reason: WaitReason
    began: float
    ended: float
    num_ahead: int
    """Sequences of its tenant that waited when it came."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """The reason of a new sequence's wait, with `num_ahead` of its tenant waiting before it."""
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_PLACE
