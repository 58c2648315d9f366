"""The rule by which tenants' limits are counted. It uses integers, so that the store in memory and
the store in Redis compute equal results.

A limit per minute is a token bucket. Its capacity is one minute's amount. It starts full, so a
burst of one minute's amount is allowed. The level of a bucket, the amount that is left, is in units
of 1/60,000 of a request or token, so a bucket with a limit of n per minute gains n units per
millisecond. A level is negative if an answer used more tokens than were reserved for it.

Each concurrent request of a tenant occupies a slot, which has a name and a deadline. The gateway
renews the slot before the deadline, so the slots of a dead gateway become free.
"""

import enum
from dataclasses import dataclass

from services.gateway.options.tenants.core.tenant import Tenant

UNITS = 60_000
MAX_ELAPSED_MILLIS = 3_600_000
"""A longer time between two changes of a bucket counts as this time. This keeps products below
2**53, since larger integers are not exact in the doubles with which Redis computes.
"""


class Quota(enum.Enum):
    """The kinds of limits, with the names that clients see."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrent_requests"


@dataclass(frozen=True, slots=True)
class LimitSet:
    """The limits of one tenant. A field that is None means no limit."""

    tenant_id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @classmethod
    def of(cls, tenant: Tenant) -> "LimitSet":
        return cls(
            tenant.caller_id,
            tenant.requests_per_minute,
            tenant.tokens_per_minute,
            tenant.max_concurrent_requests,
        )

    @property
    def is_empty(self) -> bool:
        return (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.max_concurrent_requests is None
        )

    def divided(self, num_gateways: int) -> "LimitSet":
        """Returns one gateway's part of the limits, which are divided equally among `num_gateways`
        gateways. The part of each limit is at least 1.
        """

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // num_gateways)

        return LimitSet(
            self.tenant_id,
            share(self.requests_per_minute),
            share(self.tokens_per_minute),
            share(self.max_concurrent_requests),
        )


class SlotChange(enum.Enum):
    """The effect of a change on the request's slot. HOLD occupies or renews the slot, RELEASE frees
    it, and KEEP has no effect.
    """

    KEEP = 0
    HOLD = 1
    RELEASE = -1


@dataclass(frozen=True, slots=True)
class Change:
    """One request's change to its tenant's levels and slots. The change is applied completely or
    not at all. A negative number returns requests or tokens that were taken earlier.

    If `must_fit` is false, the change is always applied. If it is true, the change is refused if a
    level is too low (even a change of 0 tokens needs a token left), or if it needs a slot and none
    is free.
    """

    slot: str
    num_requests: int = 0
    num_tokens: int = 0
    slot_change: SlotChange = SlotChange.KEEP
    must_fit: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """The levels of a tenant's buckets after a change was applied or refused, in units of 1/60,000
    of a request or token. The level of a missing limit is 0. `wait_millis` is the time until a
    refused change would be allowed, or 0 if this time is not known.
    """

    refused_by: Quota | None
    wait_millis: int
    requests_level: int
    tokens_level: int
    num_slots: int
    now_millis: int


def refilled(level: int | None, limit: int, elapsed_millis: int) -> int:
    """Returns the level that a bucket has `elapsed_millis` after it had `level`. None means a new
    bucket, which is full.
    """
    full = limit * UNITS
    if level is None:
        return full
    elapsed = min(max(elapsed_millis, 0), MAX_ELAPSED_MILLIS)
    return min(full, level + elapsed * limit)


def needed_level(amount: int, limit: int) -> int:
    """Returns the level at which a bucket allows an amount. A full bucket allows any amount."""
    return min(amount, limit) * UNITS


def wait_millis(level: int, needed: int, limit: int) -> int:
    """Returns the milliseconds until a bucket's level rises from `level` to `needed`."""
    return -(-(needed - level) // limit)
