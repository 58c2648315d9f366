"""The fair share of each tenant in the replicas' places. A place is one of the `max_num_seqs`
sequences that a replica runs at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.options.tenants.core.queues.service_charge import OUTPUT_WEIGHT, ServiceTime
from services.gateway.options.tenants.core.tenant import Tenant

ACTIVE_SECONDS = 10.0
"""Seconds after its last request for which an idle tenant still has a share."""
_PLACES_PER_RESERVED = 16
"""At most one of this many places is reserved for sequences that tenants below their shares may add
later. Places for their waiting sequences are reserved without this limit.
"""
_PLACES_PER_QUEUED = 16
"""If there is only one tenant, it may queue one sequence at the replicas for every 16 places. Then
a sequence can take a freed place in the next step.
"""
_LEAST_STARTING = 2
"""Every tenant may have this many starting sequences. A sequence is starting until its replica
reports its first step.
"""
_SHARE_PER_STARTING = 8
"""A tenant may have one starting sequence for every 8 places of its share."""
_SHARE_PER_STARTING_AT_MOST = 2
"""A tenant may have as many starting sequences as are expected to end while a sequence starts. This
limit is at most the tenant's share divided by this number. Of the three limits on starting
sequences, the largest applies.
"""
_STEPS_TO_START = 4
"""Assumed number of engine steps from sending a sequence until its first step is reported. Two of
them are steps that are already in flight.
"""


@dataclass(slots=True)
class TenantUsage:
    """The waiting, starting and running sequences of one tenant, and the service that the tenant
    received.
    """

    tenant: Tenant
    num_waiting: int = 0
    """Number of sequences that wait at the gateway."""
    num_running: int = 0
    """Number of sequences at replicas. Each has a place."""
    num_starting: int = 0
    """Number of the running sequences for which no step was reported yet."""
    asked_at: float = 0.0
    """Time of the tenant's last request, in seconds on a steady clock."""
    mean_output_tokens: float = 128.0
    service_time: ServiceTime = field(default_factory=ServiceTime)
    lag: float = 0.0
    """The tenant's lag in tokens: the highest virtual token counter of the other waiting tenants
    minus the tenant's own counter, times the tenant's weight.
    """

    def tokens_of(self, num_answers: float) -> float:
        """Returns the charge in tokens of `num_answers` answers of the tenant's mean length.
        Prompts are not included.
        """
        return num_answers * OUTPUT_WEIGHT * self.mean_output_tokens

    def num_ending(self, num_steps: int) -> int:
        """Returns how many running sequences are expected to end within `num_steps` steps, rounded
        up. The estimate uses the tenant's mean answer length, and one token per step.
        """
        return math.ceil(self.num_running * num_steps / max(1.0, self.mean_output_tokens))


class FairShares:
    """Determines which tenants may take a free place, and which tenant must return a place. The
    result is valid until a place is taken or freed.

    1. A tenant's share is the number of places in proportion to its weight, rounded down, but at
       least 1. A tenant below its share may take any free place. If no place is free, a sequence of
       the tenant furthest above its share is preempted.
    2. A tenant above its share may take a free place only if enough other places are free. One
       place is reserved for each waiting sequence of the tenants below their shares, and one more
       for each tenant that would then still be below its share. Reserved places make preemptions
       rare (trunk reservation; Kelly, "Loss networks", 1991).
    3. The number of places that a tenant needs varies by the square root of its mean (Halfin and
       Whitt, 1981). So a tenant may have the square root of its share as additional places if its
       `lag`, counted in answers of mean length, is at least this number. No other tenant is
       preempted for additional places. A tenant does not lose its additional places by preemption
       while its `lag` is above 0.
    4. Only a few sequences of a tenant may be starting at the same time. Otherwise all prompts of a
       burst would be computed before the prompts of requests that arrive later. If answers are
       short, as many sequences may start as end meanwhile. Otherwise places would stay free.
    5. A single tenant has no share. It may take every place, and queue a few sequences at the
       replicas.
    """

    def __init__(self, usages: Collection[TenantUsage], num_free: int, num_places: int) -> None:
        """`num_free` of the `num_places` places are free. `num_free` is negative while sequences
        wait at replicas.
        """
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
        """Returns the tenant that must return a place."""
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
        """Returns the number of places up to which this tenant counts as below its share."""
        share = self._share(usage)
        lags_behind = usage.lag >= usage.tokens_of(math.sqrt(share))
        return share + _variation(share) if lags_behind else share

    def _excess(self, usage: TenantUsage) -> int:
        """Returns the number of places that the tenant must return if other tenants need them."""
        share = self._share(usage)
        return usage.num_running - share - (_variation(share) if usage.lag > 0 else 0)


def _variation(num_places: int) -> int:
    return math.ceil(math.sqrt(num_places))


class Places:
    """The usage of each tenant with recent requests."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds on a steady clock."""
        self._now = now
        self._usages: dict[str, TenantUsage] = {}

    def __iter__(self) -> Iterator[TenantUsage]:
        return iter(self._usages.values())

    def usage(self, tenant: Tenant) -> TenantUsage:
        """Returns the usage of a tenant, which the caller may modify. Creates the usage of a new
        tenant.
        """
        usage = self._usages.get(tenant.caller_id)
        if usage is None:
            usage = self._usages[tenant.caller_id] = TenantUsage(tenant, asked_at=self._now())
        usage.tenant = tenant
        return usage

    def num_waiting(self, tenant: Tenant) -> int:
        usage = self._usages.get(tenant.caller_id)
        return 0 if usage is None else usage.num_waiting

    def service_time(self, tenant: Tenant) -> ServiceTime:
        """Returns the measured service time of a tenant's sequences."""
        usage = self._usages.get(tenant.caller_id)
        return ServiceTime() if usage is None else usage.service_time

    def others(self, tenant: Tenant) -> list[TenantUsage]:
        return [one for one in self._usages.values() if one.tenant.caller_id != tenant.caller_id]

    def drop_idle(self) -> list[Tenant]:
        """Removes tenants without sequences whose last request is older than
        ACTIVE_SECONDS, and returns them.
        """
        since = self._now() - ACTIVE_SECONDS
        idle = [
            usage.tenant
            for usage in self._usages.values()
            if not usage.num_waiting and not usage.num_running and usage.asked_at < since
        ]
        for tenant in idle:
            del self._usages[tenant.caller_id]
        return idle

    def share(self, tenant: Tenant) -> float:
        """Returns the tenant's weight divided by the sum of all tenants' weights. The result is
        above 0 and at most 1.
        """
        others = sum(usage.tenant.weight for usage in self.others(tenant))
        return tenant.weight / (tenant.weight + others)

    def fair_shares(
        self, num_free: int, num_places: int, lags: Iterable[tuple[Tenant, float]] = ()
    ) -> FairShares:
        """Returns the tenants' shares in `num_places` places, of which `num_free` are free. `lags`
        are pairs of a tenant and its lag in tokens. They replace earlier lags.
        """
        for tenant, lag in lags:
            if (usage := self._usages.get(tenant.caller_id)) is not None:
                usage.lag = lag
        return FairShares(self._usages.values(), num_free, num_places)
