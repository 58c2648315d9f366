"""Divides the replicas' slots for running sequences fairly among tenants. A replica has
`max_num_seqs` slots.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.options.tenants.core.queues.service_charge import OUTPUT_WEIGHT, ServiceTime
from services.gateway.options.tenants.core.tenant import Tenant

ACTIVE_SECONDS = 10.0
"""Seconds after its last request during which a tenant without sequences still has a share."""
_SLOTS_PER_RESERVED = 16
"""At most 1/16 of all slots are reserved for future sequences of tenants below their shares. Slots
that are reserved for waiting sequences of these tenants are not limited.
"""
_SLOTS_PER_QUEUED = 16
"""If there is only one tenant, it may queue one sequence at the replicas for each 16 slots, so that
a freed slot can be used in the next step.
"""
_LEAST_STARTING = 2
"""Every tenant may have this number of starting sequences. A sequence is called starting from when
it is sent until its replica reports its first step.
"""
_SHARE_PER_STARTING = 8
"""A tenant may have one starting sequence for each 8 slots of its share."""
_SHARE_PER_STARTING_AT_MOST = 2
"""The third limit on a tenant's starting sequences is the number of its sequences that are expected
to end while a sequence starts, but at most its share divided by this number. The largest of the
three limits applies.
"""
_STEPS_TO_START = 4
"""Assumed number of engine steps from sending a sequence until its first step is reported,
including two steps that are already in flight when the sequence arrives.
"""


@dataclass(slots=True)
class TenantUsage:
    """The numbers of one tenant's sequences, and measurements of these sequences."""

    tenant: Tenant
    num_waiting: int = 0
    """Number of sequences that wait at the gateway."""
    num_running: int = 0
    """Number of sequences at replicas. Each occupies a slot."""
    num_starting: int = 0
    """Number of sequences at replicas whose first step was not reported yet."""
    asked_at: float = 0.0
    """Time of the tenant's last request, in seconds on a steady clock."""
    mean_output_tokens: float = 128.0
    service_time: ServiceTime = field(default_factory=ServiceTime)
    lag: float = 0.0
    """How many tokens the tenant has been served less than other tenants with waiting sequences, as
    `FairQueue.lags` defines it.
    """

    def tokens_of(self, num_answers: float) -> float:
        """Returns the number of tokens that the tenant is charged for `num_answers` answers of its
        mean length, without their prompts.
        """
        return num_answers * OUTPUT_WEIGHT * self.mean_output_tokens

    def num_ending(self, num_steps: int) -> int:
        """Returns how many running sequences are expected to end within `num_steps` steps, rounded
        up. A sequence is assumed to have the tenant's mean answer length, and one token per step.
        """
        return math.ceil(self.num_running * num_steps / max(1.0, self.mean_output_tokens))


class FairShares:
    """Determines which tenants may occupy a free slot, and which tenant must free a slot. The
    result is valid until a slot is occupied or freed.

    1. A tenant's share is its part of all slots in proportion to its weight, rounded down, but at
       least 1. A tenant below its share may occupy any free slot. If no slot is free, a sequence of
       the tenant furthest above its share is preempted.
    2. For tenants below their shares, one slot is reserved for each waiting sequence, and one more
       for each tenant that would still be below its share if its waiting sequences ran. A tenant
       above its share may occupy a free slot only if more slots are free than are reserved.
       Reserved slots make preemptions rare (trunk reservation; Kelly, "Loss networks", 1991).
    3. The number of slots that a tenant needs varies by the square root of its mean (Halfin and
       Whitt, 1981). Let r be the square root of the tenant's share. The tenant may have r
       additional slots if its `lag` is at least r answers of mean length. No other tenant is
       preempted for additional slots. The tenant does not lose them by preemption while its `lag`
       is above 0.
    4. Only a few sequences of a tenant may be starting at one time, because otherwise all prompts
       of a burst would be computed before the prompts of later requests. If answers are short, more
       may start: as many as are expected to end while a sequence starts. Otherwise slots would stay
       free.
    5. If there is only one tenant, it may occupy every slot, and queue a few sequences at the
       replicas.
    """

    def __init__(self, usages: Collection[TenantUsage], num_free: int, num_slots: int) -> None:
        """`num_free` of all `num_slots` slots are free. It is negative while sequences wait at
        replicas.
        """
        self._usages = usages
        self._num_free = num_free
        self._num_slots = num_slots
        self._total_weight = sum(usage.tenant.weight for usage in usages)
        self._num_needed = num_below = 0
        self._waits_below_share = False
        for usage in usages:
            num_missing = self._target(usage) - usage.num_running
            self._num_needed += max(0, min(usage.num_waiting, num_missing))
            num_below += num_missing > usage.num_waiting
            is_below = usage.num_waiting > 0 and usage.num_running < self._share(usage)
            self._waits_below_share |= is_below and self._may_start(usage)
        self._num_reserved = min(num_below, num_slots // _SLOTS_PER_RESERVED)

    def may_take_slot(self, usage: TenantUsage) -> bool:
        """Whether the next waiting sequence of a tenant may be sent to a replica."""
        if len(self._usages) == 1:
            return self._num_free > -max(1, self._num_slots // _SLOTS_PER_QUEUED)
        if self._num_free <= 0 or not self._may_start(usage):
            return False
        if usage.num_running < self._target(usage):
            return True
        return self._num_free > self._num_needed + self._num_reserved

    def to_preempt(self) -> TenantUsage | None:
        """Returns the tenant whose sequence must be preempted, or None if there is none."""
        if self._num_free > 0 or not self._waits_below_share:
            return None
        furthest = max(self._usages, key=self._excess)
        return furthest if self._excess(furthest) > 0 else None

    def _share(self, usage: TenantUsage) -> int:
        return max(1, int(self._num_slots * usage.tenant.weight / self._total_weight))

    def _may_start(self, usage: TenantUsage) -> bool:
        share = self._share(usage)
        num_ending = min(usage.num_ending(_STEPS_TO_START), share // _SHARE_PER_STARTING_AT_MOST)
        bound = max(_LEAST_STARTING, share // _SHARE_PER_STARTING, num_ending)
        return usage.num_starting < bound

    def _target(self, usage: TenantUsage) -> int:
        """Returns the number of slots up to which the tenant may occupy any free slot: its share
        and, if it lags behind, its additional slots.
        """
        share = self._share(usage)
        lags_behind = usage.lag >= usage.tokens_of(math.sqrt(share))
        return share + _variation(share) if lags_behind else share

    def _excess(self, usage: TenantUsage) -> int:
        """Returns how many slots the tenant may lose by preemption."""
        share = self._share(usage)
        return usage.num_running - share - (_variation(share) if usage.lag > 0 else 0)


def _variation(num_slots: int) -> int:
    return math.ceil(math.sqrt(num_slots))


class Slots:
    """The usage of slots by each tenant with sequences or recent requests."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds on a steady clock."""
        self._now = now
        self._usages: dict[str, TenantUsage] = {}

    def __iter__(self) -> Iterator[TenantUsage]:
        return iter(self._usages.values())

    def usage(self, tenant: Tenant) -> TenantUsage:
        """Returns the TenantUsage of a tenant, which the caller may modify. Makes it if needed."""
        usage = self._usages.get(tenant.caller_id)
        if usage is None:
            usage = self._usages[tenant.caller_id] = TenantUsage(tenant, asked_at=self._now())
        usage.tenant = tenant
        return usage

    def num_waiting(self, tenant: Tenant) -> int:
        usage = self._usages.get(tenant.caller_id)
        return 0 if usage is None else usage.num_waiting

    def service_time(self, tenant: Tenant) -> ServiceTime:
        """Returns the measured running times of a tenant's sequences."""
        usage = self._usages.get(tenant.caller_id)
        return ServiceTime() if usage is None else usage.service_time

    def others(self, tenant: Tenant) -> list[TenantUsage]:
        return [one for one in self._usages.values() if one.tenant.caller_id != tenant.caller_id]

    def drop_idle(self) -> list[Tenant]:
        """Removes and returns tenants without sequences whose last request is too long ago."""
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
        """Returns the tenant's weight divided by the sum of all tenants' weights."""
        others = sum(usage.tenant.weight for usage in self.others(tenant))
        return tenant.weight / (tenant.weight + others)

    def fair_shares(
        self, num_free: int, num_slots: int, lags: Iterable[tuple[Tenant, float]] = ()
    ) -> FairShares:
        """Returns the tenants' shares of `num_slots` slots, of which `num_free` are free. `lags`
        has pairs of a tenant and its new `TenantUsage.lag`.
        """
        for tenant, lag in lags:
            if (usage := self._usages.get(tenant.caller_id)) is not None:
                usage.lag = lag
        return FairShares(self._usages.values(), num_free, num_slots)
