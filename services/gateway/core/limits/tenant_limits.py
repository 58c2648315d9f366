"""The share of its tenant's limits that a request takes, and returns at its end."""

import itertools
from collections.abc import Callable

from services.common.errors import (
    InternalError,
    QuotaExceeded,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.gateway.core.limits.rule import (
    UNITS,
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
)
from services.gateway.core.limits.store import LimitStore
from services.gateway.core.ports import KeptSource, Made
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.tenant import ANYONE, Tenant

MAX_RESERVED_OUTPUT_TOKENS = 4096
"""Most tokens that are reserved for an answer whose client names no length."""
_CONCURRENCY_RETRY_SECONDS = 1.0
_SHORTEST_RETRY_SECONDS = 0.1


_NOT_THE_CLIENTS = (ResourceExhausted, Unavailable, InternalError)
"""Errors that the client of a request has not caused."""


class LimitReached(QuotaExceeded):
    """A tenant is over one of its limits; `standing` has the levels of all of them."""

    def __init__(self, limits: LimitSet, standing: Standing, num_tokens: int = 0) -> None:
        quota = standing.refused_by or Quota.CONCURRENCY
        wait = standing.wait_millis / 1000
        if quota is Quota.CONCURRENCY:
            wait = _CONCURRENCY_RETRY_SECONDS
        super().__init__(
            f"tenant {limits.tenant_id} is over its limit of "
            + _sentence(limits, standing, num_tokens),
            tenant_id=limits.tenant_id,
            quota=quota.value,
            retry_after_seconds=max(wait, _SHORTEST_RETRY_SECONDS),
        )
        self.limits = limits
        self.standing = standing


def _sentence(limits: LimitSet, standing: Standing, num_tokens: int) -> str:
    match standing.refused_by:
        case Quota.REQUESTS:
            return f"{limits.requests_per_minute} requests per minute"
        case Quota.TOKENS:
            left = max(0, standing.tokens_level // UNITS)
            needs = f", of which this request may take {num_tokens}" if num_tokens else ""
            return f"{limits.tokens_per_minute} tokens per minute; {left} are left{needs}"
        case _:
            return f"{limits.max_concurrent_requests} requests at once"


class TenantLimits:
    """Admits requests by their tenants' limits.

    1. Before its body is read, a request takes one of the requests per minute, and a slot.
    2. Once its prompt has tokens, it reserves those that are not expected to be cached and the
       longest answer.
    3. At its end it gives the slot back, and what was not used of the reservation.
    """

    def __init__(
        self,
        store: LimitStore,
        process_name: str,
        num_cached_tokens: Callable[[EngineRequest], int],
    ) -> None:
        """`process_name` sets the slots of this gateway apart from others'. `num_cached_tokens`
        estimates how much of a prompt is cached.
        """
        self._store = store
        self._process_name = process_name
        self._numbers = itertools.count(1)
        self._num_cached_tokens = num_cached_tokens

    async def admit(self, tenant: Tenant) -> "Allowance":
        """Takes one request of a tenant. Raises LimitReached."""
        limits = LimitSet.of(tenant)
        if limits.is_empty:
            return NO_LIMITS
        slot = f"{self._process_name}-{next(self._numbers)}"
        holds = limits.max_concurrent_requests is not None
        change = Change(
            slot,
            num_requests=1,
            slot_change=SlotChange.HOLD if holds else SlotChange.KEEP,
        )
        standing = await self._store.take(limits, change)
        if standing.refused_by is not None:
            raise LimitReached(limits, standing)
        return Allowance(tenant, limits, slot, standing, self._store, self._num_cached_tokens)


class Allowance:
    """The share of the limits that one request has taken. It must be closed once, when the request
    is over.
    """

    def __init__(
        self,
        tenant: Tenant,
        limits: LimitSet,
        slot: str,
        standing: Standing | None,
        store: LimitStore | None,
        num_cached_tokens: Callable[[EngineRequest], int],
    ) -> None:
        self.tenant = tenant
        self.limits = limits
        self.standing = standing
        """What the tenant has left, as of the last change; None where it has no limits."""
        self._slot = slot
        self._store = store
        self._num_cached_tokens = num_cached_tokens
        self._generation: Generation | None = None
        self._num_reserved = 0

    async def reserve(self, generation: Generation) -> None:
        """Reserves the tokens that a request may take. Raises QuotaExceeded."""
        limit = self.limits.tokens_per_minute
        if self._store is None or limit is None:
            return
        num_tokens = self._demand(generation, limit)
        if num_tokens > limit:
            raise QuotaExceeded(
                f"this request may take {num_tokens} tokens, more than the {limit} tokens per "
                f"minute of tenant {self.tenant.tenant_id}; lower max_tokens or n, or shorten the "
                "prompt",
                tenant_id=self.tenant.tenant_id,
                quota=Quota.TOKENS.value,
                may_retry=False,
            )
        change = Change(self._slot, num_tokens=num_tokens)
        standing = self.standing = await self._store.take(self.limits, change)
        if standing.refused_by is not None:
            raise LimitReached(self.limits, standing, num_tokens)
        self._generation, self._num_reserved = generation, num_tokens

    def close(self, *, was_refused: bool = False) -> None:
        """The request is over. One that was refused for another reason than its tenant's limits
        takes none of the requests per minute.
        """
        if self._store is None:
            return
        kept = self._kept_source()
        num_used = self._num_reserved if kept is not None else self._num_used()
        holds = self.limits.max_concurrent_requests is not None
        change = Change(
            self._slot,
            num_requests=-1 if was_refused else 0,
            num_tokens=num_used - self._num_reserved,
            slot_change=SlotChange.RELEASE if holds else SlotChange.KEEP,
            must_fit=False,
        )
        if holds or change.num_requests or change.num_tokens:
            self._store.give_back(self.limits, change)
        if kept is not None:
            kept.when_making_ends(self._give_back_unused)

    def _kept_source(self) -> KeptSource | None:
        """What may go on with the answer, for an idempotency key, without this request."""
        generation = self._generation
        if generation is None or len(generation.finish_reasons()) == len(generation.choices):
            return None
        return generation.source

    def _give_back_unused(self, made: Made) -> None:
        """Gives back what an answer did not use that went on without its client."""
        if self._store is None or self._generation is None:
            return
        num_used = 0
        if any(num_cached is not None for num_cached in made.num_cached_tokens):
            usage = self._generation.usage()
            firsts = made.num_cached_tokens[:: self._generation.request.num_candidates]
            num_cached = sum(num or 0 for num in firsts)
            num_used = usage.num_prompt_tokens - num_cached + made.num_tokens
        if num_used != self._num_reserved:
            num_tokens = num_used - self._num_reserved
            change = Change(self._slot, num_tokens=num_tokens, must_fit=False)
            self._store.give_back(self.limits, change)

    def _demand(self, generation: Generation, limit: int) -> int:
        """The most tokens that a request may take: of each prompt those that are not cached, of
        each answer its longest.
        """
        request = generation.request
        firsts = generation.sequences[:: request.num_candidates]
        num_uncached = sum(
            len(first.prompt_token_ids) - self._num_cached_tokens(first) for first in firsts
        )
        longest = sum(sequence.sampling.max_tokens or 0 for sequence in generation.sequences)
        if request.sampling.max_tokens is None and request.default_max_tokens is None:
            usual = MAX_RESERVED_OUTPUT_TOKENS * len(generation.sequences)
            longest = min(longest, usual, max(limit - num_uncached, 1))
        return num_uncached + longest

    def _num_used(self) -> int:
        generation = self._generation
        if generation is None or not generation.was_taken:
            return 0
        usage = generation.usage()
        return usage.num_prompt_tokens - usage.num_cached_tokens + usage.num_generated_tokens


def was_refused(error: StepwellError) -> bool:
    """Whether a request that ended so takes nothing of its tenant's limits: it is not at fault."""
    return isinstance(error, _NOT_THE_CLIENTS) and not isinstance(error, QuotaExceeded)


def _none_cached(_request: EngineRequest) -> int:
    return 0


NO_LIMITS = Allowance(ANYONE, LimitSet(""), "", None, None, _none_cached)
"""That of every request whose tenant has no limits."""
