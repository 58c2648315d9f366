"""The rule by which limits are counted. It uses integers, so that every store computes the same
results.

A limit per minute is a token bucket. Its capacity is one minute's amount, and it starts full, so
that a burst of one minute's amount is allowed. Levels are in units of 1/60,000 of a request or
token, so that a bucket with a limit of n per minute gains n units per millisecond. A level is
negative if an answer used more than was reserved for it.

Concurrent requests are counted by slots. A slot is occupied under a name until a deadline, so that
a dead gateway's slots become free.
"""

import enum
from dataclasses import dataclass

from services.gateway.options.tenants.core.tenant import Tenant

UNITS = 60_000
MAX_ELAPSED_MILLIS = 3_600_000
"""A longer time between two changes counts as this time. This keeps products below 2**53, the limit
for exact integers in doubles, which Redis uses.
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
        """Returns one gateway's part of the limits if they are divided among several gateways. Each
        limit is at least 1.
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
    """How a change affects its slot of the concurrent requests. HOLD takes or renews the slot,
    RELEASE frees it, and KEEP has no effect on it.
    """

    KEEP = 0
    HOLD = 1
    RELEASE = -1


@dataclass(frozen=True, slots=True)
class Change:
    """One request's change to its tenant's levels and slots. The change is applied completely or
    not at all. Negative numbers return amounts that were taken earlier.

    If `must_fit` is true, the change is refused if a level is too low, no slot is free, or no token
    is left. The last rule also applies to changes that take no tokens. If `must_fit` is false, the
    change is always applied.
    """

    slot: str
    num_requests: int = 0
    num_tokens: int = 0
    slot_change: SlotChange = SlotChange.KEEP
    must_fit: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """The levels of a tenant's buckets after a change or a refusal, in units of 1/60,000 of a
    request or token. A level is 0 if there is no limit. `wait_millis` is the time until a refused
    change would fit, or 0 if it is not known.
    """

    refused_by: Quota | None
    wait_millis: int
    requests_level: int
    tokens_level: int
    num_slots: int
    now_millis: int


def refilled(level: int | None, limit: int, elapsed_millis: int) -> int:
    """Returns the level of a bucket after `elapsed_millis`. A `level` of None means a new bucket,
    which is full.
    """
    full = limit * UNITS
    if level is None:
        return full
    elapsed = min(max(elapsed_millis, 0), MAX_ELAPSED_MILLIS)
    return min(full, level + elapsed * limit)


def needed_level(amount: int, limit: int) -> int:
    """Returns the level that an amount needs. A full bucket suffices for any amount."""
    return min(amount, limit) * UNITS


def wait_millis(level: int, needed: int, limit: int) -> int:
    """Returns the milliseconds until a bucket's level rises from `level` to `needed`."""
    return -(-(needed - level) // limit)
