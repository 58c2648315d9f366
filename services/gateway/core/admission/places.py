"""The fair share of each tenant in the replicas' places. A place is one of the `max_num_seqs`
sequences that a replica runs at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.core.admission.service_charge import OUTPUT_WEIGHT
from services.gateway.core.admission.service_time import ServiceTime
from services.gateway.core.tenant import Tenant

ACTIVE_SECONDS = 10.0
"""Seconds after its last request for which an idle tenant still has a share."""
_PLACES_PER_RESERVED = 16
"""At most one place in 16 is reserved for tenants below their shares."""
_PLACES_PER_QUEUED = 16
"""A tenant alone may queue one sequence at the replicas for every 16 places, so that a freed place
is taken in the next step.
"""
_LEAST_STARTING = 2
"""A tenant may have this many starting sequences in any case."""
_SHARE_PER_STARTING = 8
"""A tenant may have one starting sequence for every 8 places of its share."""
_SHARE_PER_STARTING_AT_MOST = 2
"""A tenant may have as many starting sequences as it is expected to end while a sequence starts,
but at most its share divided by this number. The largest of the three limits on starting sequences
applies.
"""
_STEPS_TO_START = 4
"""Number of engine steps between the sending of a sequence and the report of its first step. Two
steps are assumed to be in flight.
"""


@dataclass(slots=True)
class TenantUsage:
    """The waiting, starting and running sequences of one tenant, and the service it received."""

    tenant: Tenant
    num_waiting: int = 0
    """Sequences that wait at the gateway."""
    num_running: int = 0
    """Sequences at replicas; each has a place."""
    num_starting: int = 0
    """Sequences among `num_running` for which no step was reported yet."""
    asked_at: float = 0.0
    """Time of its last request, in steady seconds."""
    mean_output_tokens: float = 128.0
    service_time: ServiceTime = field(default_factory=ServiceTime)
    lag: float = 0.0
    """Lag in tokens: the highest virtual token counter of the other waiting tenants minus its own
    counter, times its weight.
    """

    def tokens_of(self, num_answers: float) -> float:
        """The charge in tokens of `num_answers` answers of its mean length, without prompts."""
        return num_answers * OUTPUT_WEIGHT * self.mean_output_tokens

    def num_ending(self, num_steps: int) -> int:
        """The running sequences expected to end within `num_steps` steps of one token, by its mean
        answer length; rounded up.
        """
        return math.ceil(self.num_running * num_steps / max(1.0, self.mean_output_tokens))


class FairShares:
    """Determines which tenants may take a free place, and which tenant must return one. An object
    is valid for one moment.

    1. A tenant's share is its fraction of all places by weight, rounded down, and at least 1. Below
       its share it may take any free place. If none is free, the tenant furthest above its share is
       preempted.
    2. Above its share a tenant may take a free place only if enough others are free: one for each
       waiting sequence of the tenants below their shares, and one more for each of those tenants.
       These reserved places make preemptions rare (trunk reservation; Kelly, "Loss networks",
       1991).
    3. The number of places that a tenant needs varies by the square root of its mean (Halfin and
       Whitt, 1981). So if a tenant's `lag` is at least that many mean answers, it counts as below
       its share with up to the square root of its share in additional places. No other tenant is
       preempted for these, and it does not lose them by preemption while its `lag` is above 0.
    4. Only a few sequences of a tenant start at once. Otherwise all prompts of a burst would be
       computed before the prompts of requests that arrive meanwhile. If answers are short, more may
       start: as many as end while a sequence starts. Otherwise places would stay free.
    5. With a single tenant there are no shares: it may take every place, and queue a few sequences
       at the replicas.
    """

    def __init__(self, usages: Collection[TenantUsage], num_free: int, num_places: int) -> None:
        """`num_free` of `num_places` are free; negative while sequences wait at replicas."""
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
        """The tenant that must return a place. None if a place is free, if no tenant below its
        share waits, or if no tenant is above its share.
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
        """The number of places up to which this tenant has precedence over tenants
        above their shares.
        """
        share = self._share(usage)
        lags_behind = usage.lag >= usage.tokens_of(math.sqrt(share))
        return share + _variation(share) if lags_behind else share

    def _excess(self, usage: TenantUsage) -> int:
        """The places that the tenant must return if others need them."""
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
        """Returns the usage of a tenant. Callers modify the returned object. A new tenant gets a
        new object.
        """
        usage = self._usages.get(tenant.tenant_id)
        if usage is None:
            usage = self._usages[tenant.tenant_id] = TenantUsage(tenant, asked_at=self._now())
        usage.tenant = tenant
        return usage

    def num_waiting(self, tenant: Tenant) -> int:
        usage = self._usages.get(tenant.tenant_id)
        return 0 if usage is None else usage.num_waiting

    def service_time(self, tenant: Tenant) -> ServiceTime:
        """Returns the service time of a tenant's sequences. It has no measurements if the tenant is
        new.
        """
        usage = self._usages.get(tenant.tenant_id)
        return ServiceTime() if usage is None else usage.service_time

    def others(self, tenant: Tenant) -> list[TenantUsage]:
        """The usages of all other tenants."""
        return [one for one in self._usages.values() if one.tenant.tenant_id != tenant.tenant_id]

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
            del self._usages[tenant.tenant_id]
        return idle

    def share(self, tenant: Tenant) -> float:
        """The tenant's weight divided by the sum of all tenants' weights; above 0, up to 1."""
        others = sum(usage.tenant.weight for usage in self.others(tenant))
        return tenant.weight / (tenant.weight + others)

    def fair_shares(
        self, num_free: int, num_places: int, lags: Iterable[tuple[Tenant, float]] = ()
    ) -> FairShares:
        """The shares in `num_places`, of which `num_free` are free. `lags`, in tokens, replace the
        lags of the named tenants.
        """
        for tenant, lag in lags:
            if (usage := self._usages.get(tenant.tenant_id)) is not None:
                usage.lag = lag
        return FairShares(self._usages.values(), num_free, num_places)
