"""A sequence that waits in its tenant's queue, and the reason."""

import enum
from dataclasses import dataclass

from services.gateway.core.request.inflight import Inflight
from services.gateway.options.tenants.core.queues.capacity import Capacity


class WaitReason(enum.StrEnum):
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


@dataclass(slots=True)
class Waiter:
    inflight: Inflight
    reason: WaitReason
    num_ahead: int
    """Number of the tenant's sequences that were already waiting when this sequence arrived."""
    began: float
    """Time when the wait began, in seconds on the event loop's clock."""
    was_preempted: bool = False
    """Whether the sequence was running and lost its place. If true, the queue's time limit does not
    apply.
    """
    has_to_wait: bool = False
    """Whether the sequence was not sent at once. If so, its wait is recorded when it is sent."""


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """Returns the wait reason of a new sequence. `num_ahead` sequences of the same tenant wait
    before it.
    """
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_PLACE
