"""How the places of replicas are divided among tenants. A place is one of the `max_num_seqs`
sequences that a replica runs at once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from services.gateway.core.admission.service_charge import OUTPUT_WEIGHT
from services.gateway.core.admission.service_time import ServiceTime
from services.gateway.core.tenant import Tenant

ACTIVE_SECONDS = 10.0
"""So long after its last request a tenant counts as one that asks."""
_KEPT_FREE = 16
"""One in so many places is kept free, at most."""
_AHEAD = 16
"""A tenant alone may have one sequence in so many places ahead, so that no step runs short."""
_LEAST_STARTING = 2
"""So many sequences of a tenant may be starting in any case."""
_STARTING_ALWAYS, _STARTING_AT_MOST = 8, 2
"""Of its share, one in so many may be where that is more, and one in so many at most."""
_STEPS_TO_START = 4
"""With two steps in flight, so many run about while a sequence starts: from when it is sent until
its first step is known to be done.
"""


@dataclass(slots=True)
class Use:
    """What one tenant has, and wants, at present."""

    tenant: Tenant
    num_waiting: int = 0
    num_running: int = 0
    num_starting: int = 0
    """Of those, the ones that were not scheduled yet."""
    asked_at: float = 0.0
    mean_output_tokens: float = 128.0
    service_time: ServiceTime = field(default_factory=ServiceTime)
    lag: float = 0.0
    """So many tokens less it was served than another tenant that waits."""

    def tokens_of(self, num_answers: float) -> float:
        """What so many answers of the tenant are charged, their prompts left out."""
        return num_answers * OUTPUT_WEIGHT * self.mean_output_tokens

    def num_ending(self, num_steps: int) -> int:
        """Of its sequences that run, how many end in so many steps of a token each, rounded up."""
        return math.ceil(self.num_running * num_steps / max(1.0, self.mean_output_tokens))


class Division:
    """How places are divided at one moment.

    1. Each tenant that asked lately has a share of all places, in proportion to its weight: one at
       least. Below its share a tenant may take any free place; where none is free, the tenant that
       is furthest above its share gives one back.
    2. Above its share a tenant may take the places that those below theirs do not wait for, but for
       one that is kept free for each of those (trunk reservation; Kelly, "Loss networks", 1991), so
       that places seldom have to be given back.
    3. How many places a tenant needs varies by the square root of their number (Halfin and Whitt,
       1981). One that lacks the service of as many answers, since it asked for less before, counts
       as below its share with so many more places, for which no other gives one back; and it gives
       none of them back as long as it lacks any.
    4. A tenant has few sequences at once that start: else the prompts of a flood would be computed
       together, before those of others that come meanwhile. As many start as end while one does,
       so that its places do not empty: more where its answers are short.
    5. A tenant alone has all places.
    """

    def __init__(self, uses: Collection[Use], num_free: int, num_places: int) -> None:
        """Of `num_places`, `num_free` are free; below 0, sequences are ahead of those that run."""
        self._uses = uses
        self._num_free = num_free
        self._num_places = num_places
        self._weights = sum(use.tenant.weight for use in uses)
        self._num_awaited = num_kept = 0
        self._has_to_have = False
        for use in uses:
            num_more = self._most_to_take(use) - use.num_running
            self._num_awaited += max(0, min(use.num_waiting, num_more))
            num_kept += num_more > use.num_waiting
            is_below = use.num_waiting > 0 and use.num_running < self._share(use)
            self._has_to_have |= is_below and self._may_start(use)
        self._num_kept = min(num_kept, num_places // _KEPT_FREE)

    def may_take(self, use: Use) -> bool:
        """Whether the tenant may have a place that is free."""
        if len(self._uses) == 1:
            return self._num_free > -max(1, self._num_places // _AHEAD)
        if self._num_free <= 0 or not self._may_start(use):
            return False
        if use.num_running < self._most_to_take(use):
            return True
        return self._num_free > self._num_awaited + self._num_kept

    def gives_back(self) -> Use | None:
        """The tenant that is to give back a place; None while there is no need, or none that has
        more than its share.
        """
        if self._num_free > 0 or not self._has_to_have:
            return None
        most = max(self._uses, key=self._num_to_give)
        return most if self._num_to_give(most) > 0 else None

    def _share(self, use: Use) -> int:
        return max(1, int(self._num_places * use.tenant.weight / self._weights))

    def _may_start(self, use: Use) -> bool:
        share = self._share(use)
        most = min(use.num_ending(_STEPS_TO_START), share // _STARTING_AT_MOST)
        return use.num_starting < max(_LEAST_STARTING, share // _STARTING_ALWAYS, most)

    def _most_to_take(self, use: Use) -> int:
        """As long as it has fewer, places are kept free for it."""
        share = self._share(use)
        lacks = use.lag >= use.tokens_of(math.sqrt(share))
        return share + _variation(share) if lacks else share

    def _num_to_give(self, use: Use) -> int:
        share = self._share(use)
        return use.num_running - share - (_variation(share) if use.lag > 0 else 0)


def _variation(num_places: int) -> int:
    return math.ceil(math.sqrt(num_places))


class Places:
    """What tenants have and want of the places."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` gives steady seconds."""
        self._now = now
        self._uses: dict[str, Use] = {}

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def of(self, tenant: Tenant) -> Use:
        """What a tenant has and wants; it is kept as long as it is changed soon."""
        use = self._uses.get(tenant.tenant_id)
        if use is None:
            use = self._uses[tenant.tenant_id] = Use(tenant, asked_at=self._now())
        use.tenant = tenant
        return use

    def num_waiting(self, tenant: Tenant) -> int:
        use = self._uses.get(tenant.tenant_id)
        return 0 if use is None else use.num_waiting

    def service_time(self, tenant: Tenant) -> ServiceTime:
        """How long its sequences take, as far as that is known."""
        use = self._uses.get(tenant.tenant_id)
        return ServiceTime() if use is None else use.service_time

    def others(self, tenant: Tenant) -> list[Use]:
        """What the other tenants have and want."""
        return [use for use in self._uses.values() if use.tenant.tenant_id != tenant.tenant_id]

    def drop_idle(self) -> list[Tenant]:
        """Leaves out the tenants that ask no more, and returns them."""
        since = self._now() - ACTIVE_SECONDS
        idle = [
            use.tenant
            for use in self._uses.values()
            if not use.num_waiting and not use.num_running and use.asked_at < since
        ]
        for tenant in idle:
            del self._uses[tenant.tenant_id]
        return idle

    def share(self, tenant: Tenant) -> float:
        """The part of everything that is the tenant's while all that ask want more: 0 to 1."""
        others = sum(use.tenant.weight for use in self.others(tenant))
        return tenant.weight / (tenant.weight + others)

    def divided(
        self, num_free: int, num_places: int, lags: Iterable[tuple[Tenant, float]] = ()
    ) -> Division:
        """How so many places are divided now; `lags` are those of tenants."""
        for tenant, lag in lags:
            if (use := self._uses.get(tenant.tenant_id)) is not None:
                use.lag = lag
        return Division(self._uses.values(), num_free, num_places)
