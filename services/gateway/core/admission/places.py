"""The fair share of each tenant in the places of the replicas. A place is one of the `max_num_seqs`
sequences that a replica runs at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.core.admission.service_charge import OUTPUT_WEIGHT
from services.gateway.core.admission.service_time import ServiceTime
from services.gateway.core.tenant import Tenant

ACTIVE_SECONDS = 10.0
"""Seconds after its last request in which an idle tenant still has a share."""
_PLACES_PER_RESERVED = 16
"""At most one place in 16 is reserved for tenants below their shares."""
_PLACES_PER_QUEUED = 16
"""A tenant alone may have one sequence for every 16 places queued at the replicas, so that a place
that becomes free is taken in the next step.
"""
_LEAST_STARTING = 2
"""Any tenant may have two starting sequences,"""
_SHARE_PER_STARTING = 8
"""or an eighth of its share,"""
_SHARE_PER_STARTING_AT_MOST = 2
"""or as many as end meanwhile, up to half of its share: the largest of the three."""
_STEPS_TO_START = 4
"""Steps from when a sequence is sent until the gateway learns of its first one, with two steps in
flight.
"""


@dataclass(slots=True)
class TenantUsage:
    """The sequences of one tenant that wait, start and run, and the service that it has had."""

    tenant: Tenant
    num_waiting: int = 0
    """At the gateway."""
    num_running: int = 0
    """At replicas: each has a place."""
    num_starting: int = 0
    """The part of `num_running` of which no step is known yet."""
    asked_at: float = 0.0
    """When its last request came, in steady seconds."""
    mean_output_tokens: float = 128.0
    service_time: ServiceTime = field(default_factory=ServiceTime)
    lag: float = 0.0
    """Tokens that it was served less than the waiting tenant that was served most, by weight."""

    def tokens_of(self, num_answers: float) -> float:
        """The charge of `num_answers` of its mean length, in tokens, without their prompts."""
        return num_answers * OUTPUT_WEIGHT * self.mean_output_tokens

    def num_ending(self, num_steps: int) -> int:
        """The running sequences that end within `num_steps` of one token each, by the mean length
        of its answers; rounded up.
        """
        return math.ceil(self.num_running * num_steps / max(1.0, self.mean_output_tokens))


class FairShares:
    """Which tenant may take a free place, and which has to give one back, at one moment.

    1. The share of a tenant is its part of all places by weight, rounded down, and at least 1.
       Below its share it may take any free place. If none is free, the tenant furthest above its
       share is preempted.
    2. Above its share a tenant may take a free place only if more are free than the waiting
       sequences of the tenants below theirs need, and one more for each of those tenants. These
       reserved places make preemptions rare (trunk reservation; Kelly, "Loss networks", 1991).
    3. The number of places that a tenant needs varies by the square root of its mean (Halfin and
       Whitt, 1981). So a tenant counts as below its share with up to the square root of it in
       further places, if its `lag` is at least as many mean answers; no other one is preempted for
       these. While its `lag` is above 0, it is not preempted for them either.
    4. Few sequences of a tenant start at once: else all prompts of a burst would be computed before
       those of requests that come meanwhile. Where its answers are short, as many may start as end
       in the time of a start: else places would stay free.
    5. With one tenant, there are no shares: it may take every place, and queue a few sequences at
       the replicas.
    """

    def __init__(self, usages: Collection[TenantUsage], num_free: int, num_places: int) -> None:
        """Of `num_places`, `num_free` are free; less than 0 while sequences wait at replicas."""
        self._usages = usages
        self._num_free = num_free
        self._num_places = num_places
        self._total_weight = sum(usage.tenant.weight for usage in usages)
        self._num_needed = num_below = 0
        self._waits_below_share = False
        for usage in usages:
            num_missing = self._target(usage) - usage.num_running
            self._num_needed += max(0, min(usage.num_waiting, num_missing))
            num_below += num_missing > usage.num_waiting
            is_below = usage.num_waiting > 0 and usage.num_running < self._share(usage)
            self._waits_below_share |= is_below and self._may_start(usage)
        self._num_reserved = min(num_below, num_places // _PLACES_PER_RESERVED)

    def may_take_place(self, usage: TenantUsage) -> bool:
        """Whether the next waiting sequence of a tenant may be sent to a replica."""
        if len(self._usages) == 1:
            return self._num_free > -max(1, self._num_places // _PLACES_PER_QUEUED)
        if self._num_free <= 0 or not self._may_start(usage):
            return False
        if usage.num_running < self._target(usage):
            return True
        return self._num_free > self._num_needed + self._num_reserved

    def to_preempt(self) -> TenantUsage | None:
        """The tenant that has to give back a place. None if a place is free, if no tenant below its
        share waits for one, or if no tenant is above its share.
        """
        if self._num_free > 0 or not self._waits_below_share:
            return None
        furthest = max(self._usages, key=self._excess)
        return furthest if self._excess(furthest) > 0 else None

    def _share(self, usage: TenantUsage) -> int:
        return max(1, int(self._num_places * usage.tenant.weight / self._total_weight))

    def _may_start(self, usage: TenantUsage) -> bool:
        share = self._share(usage)
        num_ending = min(usage.num_ending(_STEPS_TO_START), share // _SHARE_PER_STARTING_AT_MOST)
        bound = max(_LEAST_STARTING, share // _SHARE_PER_STARTING, num_ending)
        return usage.num_starting < bound

    def _target(self, usage: TenantUsage) -> int:
        """The places up to which free ones are for this tenant before those above theirs."""
        share = self._share(usage)
        lags_behind = usage.lag >= usage.tokens_of(math.sqrt(share))
        return share + _variation(share) if lags_behind else share

    def _excess(self, usage: TenantUsage) -> int:
        """The places that the tenant has to give back if others need them."""
        share = self._share(usage)
        return usage.num_running - share - (_variation(share) if usage.lag > 0 else 0)


def _variation(num_places: int) -> int:
    return math.ceil(math.sqrt(num_places))


class Places:
    """The usage of each tenant that asked lately."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` gives steady seconds."""
        self._now = now
        self._usages: dict[str, TenantUsage] = {}

    def __iter__(self) -> Iterator[TenantUsage]:
        return iter(self._usages.values())

    def usage(self, tenant: Tenant) -> TenantUsage:
        """The usage of a tenant, to be changed in place; created if the tenant is new."""
        usage = self._usages.get(tenant.tenant_id)
        if usage is None:
            usage = self._usages[tenant.tenant_id] = TenantUsage(tenant, asked_at=self._now())
        usage.tenant = tenant
        return usage

    def num_waiting(self, tenant: Tenant) -> int:
        usage = self._usages.get(tenant.tenant_id)
        return 0 if usage is None else usage.num_waiting

    def service_time(self, tenant: Tenant) -> ServiceTime:
        """The service time of a tenant's sequences; one without measurements for a new tenant."""
        usage = self._usages.get(tenant.tenant_id)
        return ServiceTime() if usage is None else usage.service_time

    def others(self, tenant: Tenant) -> list[TenantUsage]:
        """The usages of all other tenants."""
        return [one for one in self._usages.values() if one.tenant.tenant_id != tenant.tenant_id]

    def drop_idle(self) -> list[Tenant]:
        """Removes the tenants without sequences whose last request came more than ACTIVE_SECONDS
        ago, and returns them.
        """
        since = self._now() - ACTIVE_SECONDS
        idle = [
            usage.tenant
            for usage in self._usages.values()
            if not usage.num_waiting and not usage.num_running and usage.asked_at < since
        ]
        for tenant in idle:
            del self._usages[tenant.tenant_id]
        return idle

    def share(self, tenant: Tenant) -> float:
        """The tenant's weight divided by that of all tenants, itself included; above 0, up to 1."""
        others = sum(usage.tenant.weight for usage in self.others(tenant))
        return tenant.weight / (tenant.weight + others)

    def fair_shares(
        self, num_free: int, num_places: int, lags: Iterable[tuple[Tenant, float]] = ()
    ) -> FairShares:
        """The shares in `num_places`, of which `num_free` are free. `lags`, in tokens, replace
        those of the tenants that they name.
        """
        for tenant, lag in lags:
            if (usage := self._usages.get(tenant.tenant_id)) is not None:
                usage.lag = lag
        return FairShares(self._usages.values(), num_free, num_places)
