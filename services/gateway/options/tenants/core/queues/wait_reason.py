"""The reason for which a sequence had to wait when it was queued."""

import enum

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


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """Returns the wait reason of a new sequence. `num_ahead` sequences of the same tenant wait
    before it.
    """
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_PLACE
