"""The rule of limits, in whole numbers, so that every store computes the same.

A limit per minute is a token bucket that holds one minute's worth and begins full (a burst of one
minute). Levels are counted in units of 1/60,000 of a request or token: a bucket with a limit of n
per minute gains n units each millisecond. A level may be below zero, where an answer took more than
was reserved for it.

Requests at once are slots, each held under a name until a deadline, so that those of a gateway that
died are free again some time later.
"""

import enum
from dataclasses import dataclass

from services.gateway.core.tenant import Tenant

UNITS = 60_000
MAX_ELAPSED_MILLIS = 3_600_000
"""More time than this between two changes counts as this; products stay below 2**53, up to which a
double is exact (Redis computes with them).
"""


class Quota(enum.Enum):
    """The kinds of limits, by the names that clients get."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrent_requests"


@dataclass(frozen=True, slots=True)
class LimitSet:
    """The limits of one tenant; None is no limit."""

    tenant_id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @classmethod
    def of(cls, tenant: Tenant) -> "LimitSet":
        return cls(
            tenant.tenant_id,
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
        """The share of one of several gateways; at least one of each."""

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // num_gateways)

        return LimitSet(
            self.tenant_id,
            share(self.requests_per_minute),
            share(self.tokens_per_minute),
            share(self.max_concurrent_requests),
        )


class SlotChange(enum.Enum):
    """Whether a change takes, keeps or returns a slot of the concurrent requests."""

    KEEP = 0
    HOLD = 1
    RELEASE = -1


@dataclass(frozen=True, slots=True)
class Change:
    """What one request takes of its tenant's limits, all of it or nothing. Numbers below 0 return
    what it took.

    With `must_fit` the change is refused if a level is too low or no slot is free, and, even if it
    takes no tokens, if not one token is left. Without, it is applied in any case.
    """

    slot: str
    num_requests: int = 0
    num_tokens: int = 0
    slot_change: SlotChange = SlotChange.KEEP
    must_fit: bool = True


@dataclass(frozen=True, slots=True)
class Standing:
    """The levels of a tenant's buckets after a change, or at its refusal, in units; 0 where there
    is no limit. `wait_millis` is the time until what was refused would fit; 0: not known.
    """

    refused_by: Quota | None
    wait_millis: int
    requests_level: int
    tokens_level: int
    num_slots: int
    now_millis: int


def refilled(level: int | None, limit: int, elapsed_millis: int) -> int:
    """The level of a bucket some time after it was `level`; None: it is new, and full."""
    full = limit * UNITS
    if level is None:
        return full
    elapsed = min(max(elapsed_millis, 0), MAX_ELAPSED_MILLIS)
    return min(full, level + elapsed * limit)


def needed_level(amount: int, limit: int) -> int:
    """The level that an amount needs; a full bucket suffices for any."""
    return min(amount, limit) * UNITS


def wait_millis(level: int, needed: int, limit: int) -> int:
    """How long a bucket takes to rise to a level above its own."""
    return -(-(needed - level) // limit)
