"""A sequence (a request's prompt and one answer) in its tenant's queue, with the wait's reason."""

import enum
from dataclasses import dataclass

from services.gateway.core.request.inflight import Inflight
from services.gateway.options.tenants.core.queues.capacity import Capacity


class WaitReason(enum.StrEnum):
    """Why a sequence had to wait when it was queued."""

    NO_SLOT = "no_slot"
    """No replica had a free slot for a running sequence."""
    SHARE = "share"
    """The free slots were reserved for tenants below their fair shares, or the sequence's tenant
    had too many sequences that had not run a step yet.
    """
    TURN = "turn"
    """Other sequences of the same tenant waited before this sequence."""
    PREEMPTED = "preempted"
    """The sequence was preempted in favor of a tenant below its share."""


@dataclass(slots=True)
class Waiter:
    inflight: Inflight
    reason: WaitReason
    num_ahead: int
    """Number of the tenant's sequences that were already waiting when this sequence arrived."""
    began: float
    """Time when the wait began, in seconds on the event loop's clock."""
    was_preempted: bool = False
    """Whether the sequence was preempted, so that the limit on the waiting time does not apply."""
    has_to_wait: bool = False
    """Whether the sequence was not sent at once. If true, its wait is recorded when it is sent."""


def wait_reason(num_ahead: int, capacity: Capacity | None) -> WaitReason:
    """Returns why a new sequence must wait behind `num_ahead` sequences of its tenant."""
    if num_ahead:
        return WaitReason.TURN
    if capacity is not None and capacity.num_free > 0:
        return WaitReason.SHARE
    return WaitReason.NO_SLOT
