"""Counts tenants' requests and tokens in this process. Used if Redis is not configured, and while
Redis is unavailable.
"""

import asyncio
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field

from services.gateway.options.tenants.core.limits.rule import (
    UNITS,
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
    needed_level,
    refilled,
    wait_millis,
)

FOREVER_MILLIS = 2**52


@dataclass(slots=True)
class _State:
    requests: int | None = None
    tokens: int | None = None
    at: int = 0
    slots: dict[str, int] = field(default_factory=dict)


class MemoryLimits:
    """A LimitStore in memory. Each concurrent request of a tenant occupies a slot, which expires
    `lease_millis` after the last change with HOLD.
    """

    def __init__(self, now_millis: Callable[[], int], lease_millis: int = FOREVER_MILLIS) -> None:
        self._now_millis = now_millis
        self._lease_millis = lease_millis
        self._states: dict[str, _State] = {}

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        return self.apply(limits, change)

    def give_back(self, limits: LimitSet, change: Change) -> None:
        self.apply(limits, change)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def apply(self, limits: LimitSet, change: Change) -> Standing:
        now = self._now_millis()
        state = self._states.setdefault(limits.tenant_id, _State(at=now))
        elapsed = now - state.at
        of_requests, of_tokens = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
        requests = refilled(state.requests, of_requests, elapsed)
        tokens = refilled(state.tokens, of_tokens, elapsed)
        slots = state.slots
        for name in [name for name, deadline in slots.items() if deadline <= now]:
            del slots[name]
        refused_by, wait = None, 0
        if change.must_fit:
            refused_by, wait = _refusal(limits, change, requests, tokens, slots)
        if refused_by is None:
            requests = min(of_requests * UNITS, requests - change.num_requests * UNITS)
            tokens = min(of_tokens * UNITS, tokens - change.num_tokens * UNITS)
            state.requests = requests if of_requests else None
            state.tokens = tokens if of_tokens else None
            state.at = now
            if change.slot_change is SlotChange.HOLD:
                slots[change.slot] = now + self._lease_millis
            elif change.slot_change is SlotChange.RELEASE:
                slots.pop(change.slot, None)
        return Standing(
            refused_by,
            wait,
            requests if of_requests else 0,
            tokens if of_tokens else 0,
            len(slots),
            now,
        )

    def begin(self, limits: LimitSet, requests_level: int, tokens_level: int) -> None:
        """Sets the levels of a tenant's limits, the amounts that are left, unless they are already
        counted here. The given levels are this gateway's part of the tenant's levels in Redis.
        """
        state = self._states.setdefault(limits.tenant_id, _State(at=self._now_millis()))
        if state.requests is None and state.tokens is None:
            state.at = self._now_millis()
            state.requests = requests_level if limits.requests_per_minute else None
            state.tokens = tokens_level if limits.tokens_per_minute else None

    def forget_levels(self) -> None:
        """Resets all levels to full, but keeps the slots."""
        for state in self._states.values():
            state.requests = state.tokens = None

    def slots(self) -> dict[str, KeysView[str]]:
        """Returns a map from tenants' ids to views of the names of their occupied slots."""
        return {name: state.slots.keys() for name, state in self._states.items() if state.slots}


def _refusal(
    limits: LimitSet, change: Change, requests: int, tokens: int, slots: dict[str, int]
) -> tuple[Quota | None, int]:
    """Returns the limit that refuses a change at these levels, or None if no limit refuses it, and
    the milliseconds until the change would be allowed, or 0 if this time is not known.
    """
    limit = limits.requests_per_minute
    if limit is not None and change.num_requests > 0:
        needed = needed_level(change.num_requests, limit)
        if requests < needed:
            return Quota.REQUESTS, wait_millis(requests, needed, limit)
    limit = limits.tokens_per_minute
    if limit is not None:
        needed = needed_level(max(change.num_tokens, 1), limit)
        if tokens < needed:
            return Quota.TOKENS, wait_millis(tokens, needed, limit)
    limit = limits.max_concurrent_requests
    takes_slot = change.slot_change is SlotChange.HOLD and change.slot not in slots
    if limit is not None and takes_slot and len(slots) >= limit:
        return Quota.CONCURRENCY, 0
    return None, 0
