"""Why a sequence waited at the gateway, and for how long."""

import enum
from dataclasses import dataclass

from services.gateway.core.admission.capacity import Capacity


class WaitReason(enum.Enum):
    """What a sequence waited for first."""

    NO_PLACE = "no_place"
    """Every replica ran as many as it may."""
    SHARE = "share"
    """Its tenant had its share, and the places that were free are kept for others; or as many of
    its sequences were starting as may at once.
    """
    TURN = "turn"
    """Others of its tenant came before it."""
    PREEMPTED = "preempted"
    """It ran, and its place went to another tenant, which had fewer than its share."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that is over. Times are on the event loop's clock, in seconds."""

    reason: WaitReason
    began: float
    ended: float
    num_ahead: int
    """Sequences of its tenant that waited when it came."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """What a new sequence waits for first, with so many of its tenant ahead of it."""
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_PLACE
