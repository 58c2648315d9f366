"""The expected decisions of a tenant's limits, computed from the tenant's whole history."""

from dataclasses import dataclass, field

from services.gateway.options.tenants.core.limits.rule import (
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
)

UNITS = 60_000


@dataclass
class LimitsOracle:
    """Computes the levels of the token buckets from the history of all changes, and compares them
    with the levels that a store returns.

    A bucket's level never exceeds its capacity. So the level is the minimum of several levels, each
    computed under the assumption that the bucket was full just before one of the changes, just
    after it, or is full now.
    """

    limits: LimitSet
    lease_millis: int
    taken: list[tuple[int, int, int]] = field(default_factory=list)
    """Time, requests and tokens of each change that was accepted."""
    slots: list[tuple[int, str, bool]] = field(default_factory=list)
    """Time and name of each change of a slot, and whether it was acquired (otherwise released)."""

    def level(self, which: int, limit: int, now: int) -> int:
        """The level of a bucket in units. `which` is 1 for requests and 2 for tokens."""
        capacity = limit * UNITS
        levels = [capacity]
        for number, (when, *_) in enumerate(self.taken):
            since = limit * (now - when)
            after = UNITS * sum(entry[which] for entry in self.taken[number + 1 :])
            own = UNITS * self.taken[number][which]
            levels += [capacity - after + since, capacity - after - own + since]
        return min(levels)

    def held(self, now: int) -> set[str]:
        last = {name: (when, is_held) for when, name, is_held in self.slots}
        return {
            name
            for name, (when, is_held) in last.items()
            if is_held and when + self.lease_millis > now
        }

    def check(self, change: Change, standing: Standing) -> None:
        """Checks the store's answer to a change, and adds the change to the history."""
        now, limits = standing.now_millis, self.limits
        refused_by, wait_bounds = None, (0, 0)
        if change.must_fit:
            refused_by, wait_bounds = self._refusal(change, now)
        assert standing.refused_by is refused_by
        assert wait_bounds[0] <= standing.wait_millis <= wait_bounds[1]
        if refused_by is None:
            self.taken.append((now, change.num_requests, change.num_tokens))
            if change.slot_change is not SlotChange.KEEP:
                self.slots.append((now, change.slot, change.slot_change is SlotChange.HOLD))
        of_requests, of_tokens = limits.requests_per_minute, limits.tokens_per_minute
        assert standing.requests_level == (self.level(1, of_requests, now) if of_requests else 0)
        assert standing.tokens_level == (self.level(2, of_tokens, now) if of_tokens else 0)
        assert standing.num_slots == len(self.held(now))

    def _refusal(self, change: Change, now: int) -> tuple[Quota | None, tuple[int, int]]:
        """The limit that must refuse a change (None if the change fits), and the bounds of the
        waiting time in milliseconds that the store must report.
        """
        for which, quota, limit, amount in (
            (1, Quota.REQUESTS, self.limits.requests_per_minute, change.num_requests),
            (2, Quota.TOKENS, self.limits.tokens_per_minute, max(1, change.num_tokens)),
        ):
            if limit is None or amount <= 0:
                continue
            missing = min(amount, limit) * UNITS - self.level(which, limit, now)
            if missing > 0:
                return quota, (missing / limit, missing / limit + 1)  # type: ignore[return-value]
        most = self.limits.max_concurrent_requests
        held = self.held(now)
        takes_slot = change.slot_change is SlotChange.HOLD and change.slot not in held
        if most is not None and takes_slot and len(held) >= most:
            return Quota.CONCURRENCY, (0, 0)
        return None, (0, 0)
