"""Reserves amounts of a tenant's limits for each request, and returns unused amounts later."""

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from services.common.errors import (
    InternalError,
    QuotaExceeded,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.gateway.core.caller import Caller
from services.gateway.core.request.engine import KeptSource, Made
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.request import EngineRequest
from services.gateway.options.tenants.core.limits.rule import (
    UNITS,
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
)
from services.gateway.options.tenants.core.tenant import Tenant


class LimitStore(Protocol):
    """Counts tenants' requests and tokens by the rule in the module `limits.rule`."""

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        """Applies or refuses a change. Never raises an error, and waits for at most a few
        hundredths of a second.
        """
        ...

    def give_back(self, limits: LimitSet, change: Change) -> None:
        """Applies a change, whose `must_fit` must be false, at once or soon after the call."""
        ...

    async def run(self) -> None:
        """Maintains the store until cancelled, for example renews leases."""
        ...


MAX_RESERVED_OUTPUT_TOKENS = 4096
"""Limit on the number of tokens reserved for an answer if the client sets no maximum length."""
_CONCURRENCY_RETRY_SECONDS = 1.0
_SHORTEST_RETRY_SECONDS = 0.1


_NOT_THE_CLIENTS = (ResourceExhausted, Unavailable, InternalError)
"""Errors that the client did not cause."""


class LimitReached(QuotaExceeded):
    """A tenant has exceeded one of its limits. `standing` has the remaining amounts of all
    limits.
    """

    def __init__(self, limits: LimitSet, standing: Standing, num_tokens: int = 0) -> None:
        quota = standing.refused_by or Quota.CONCURRENCY
        wait = standing.wait_millis / 1000
        if quota is Quota.CONCURRENCY:
            wait = _CONCURRENCY_RETRY_SECONDS
        super().__init__(
            f"tenant {limits.tenant_id} has reached its limit of "
            + _sentence(limits, standing, num_tokens),
            tenant_id=limits.tenant_id,
            quota=quota.value,
            retry_after_seconds=max(wait, _SHORTEST_RETRY_SECONDS),
        )
        self.limits = limits
        self.standing = standing

    @property
    def metric_reason(self) -> str:
        return f"{self.quota}_{super().metric_reason}"


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
    """Admits requests within their tenants' limits.

    1. Before a request's body is read, the request is counted in the tenant's requests per minute,
       and occupies a slot of the tenant's concurrent requests.
    2. When the prompt is tokenized, tokens are reserved: the prompt tokens that are not expected to
       be cached, and the maximum length of the answer.
    3. At the request's end, the slot is released, and unused tokens are returned.
    """

    def __init__(
        self,
        store: LimitStore,
        process_name: str,
        num_cached_tokens: Callable[[EngineRequest], int],
    ) -> None:
        """`process_name` distinguishes this gateway's slots from other gateways' slots.
        `num_cached_tokens` estimates how many tokens of a prompt are cached.
        """
        self.store = store
        self._process_name = process_name
        self._numbers = itertools.count(1)
        self._num_cached_tokens = num_cached_tokens

    async def admit(self, tenant: Caller) -> "Allowance | None":
        """Counts a request towards its tenant's limits. Returns None if the tenant has no limits.
        Raises LimitReached if the request would exceed a limit.
        """
        if not isinstance(tenant, Tenant) or (limits := LimitSet.of(tenant)).is_empty:
            return None
        slot = f"{self._process_name}-{next(self._numbers)}"
        holds = limits.max_concurrent_requests is not None
        change = Change(
            slot, num_requests=1, slot_change=SlotChange.HOLD if holds else SlotChange.KEEP
        )
        standing = await self.store.take(limits, change)
        if standing.refused_by is not None:
            raise LimitReached(limits, standing)
        return Allowance(tenant, limits, slot, standing, self.store, self._num_cached_tokens)


@dataclass(eq=False)
class Allowance:
    """The amounts that one request has taken from its tenant's limits. `close` must be called
    exactly once, at the request's end.
    """

    tenant: Tenant
    limits: LimitSet
    slot: str
    standing: Standing
    """The levels of the tenant's limits after the last change."""
    store: LimitStore
    num_cached_tokens: Callable[[EngineRequest], int]
    _num_reserved: int = 0

    async def reserve(self, generation: Generation) -> None:
        """Reserves the largest number of tokens that the request may use. Raises QuotaExceeded if
        the tenant's limit on tokens per minute does not allow them.
        """
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        num_tokens = self._demand(generation, limit)
        if num_tokens > limit:
            raise QuotaExceeded(
                f"this request may take {num_tokens} tokens, more than the {limit} tokens per "
                f"minute of tenant {self.tenant.caller_id}; lower max_tokens or n, or shorten the "
                "prompt",
                tenant_id=self.tenant.caller_id,
                quota=Quota.TOKENS.value,
                may_retry=False,
            )
        change = Change(self.slot, num_tokens=num_tokens)
        standing = self.standing = await self.store.take(self.limits, change)
        if standing.refused_by is not None:
            raise LimitReached(self.limits, standing, num_tokens)
        self._num_reserved = num_tokens

    def close(self, generation: Generation | None, *, was_refused: bool = False) -> None:
        """Ends the request. `generation` is what ran, or None if nothing ran: after `reserve`, it
        may have been replaced by one that reads a shared answer. If `was_refused` is true, and no
        replica had scheduled the request, it does not count towards the requests per minute,
        because it was refused for another reason than its tenant's limits.
        """
        was_refused = was_refused and not (generation is not None and generation.was_taken)
        if not self._num_reserved or (generation is not None and generation.is_replay):
            generation = None
        kept = None if generation is None else _kept_source(generation)
        num_used = self._num_reserved if kept is not None else _num_used(generation)
        holds = self.limits.max_concurrent_requests is not None
        change = Change(
            self.slot,
            num_requests=-1 if was_refused else 0,
            num_tokens=num_used - self._num_reserved,
            slot_change=SlotChange.RELEASE if holds else SlotChange.KEEP,
            must_fit=False,
        )
        if holds or change.num_requests or change.num_tokens:
            self.store.give_back(self.limits, change)
        if kept is not None and generation is not None:
            kept.when_making_ends(partial(self._give_back_unused, generation))

    def _give_back_unused(self, generation: Generation, made: Made) -> None:
        """Returns unused tokens to the limit, after the end of an answer that was generated further
        without its client.
        """
        num_used = 0
        if any(num_cached is not None for num_cached in made.num_cached_tokens):
            firsts = made.num_cached_tokens[:: generation.request.num_candidates]
            num_uncached = generation.usage().num_prompt_tokens - sum(num or 0 for num in firsts)
            num_used = num_uncached + made.num_tokens - generation.num_resumed_tokens
        if num_used != self._num_reserved:
            num_tokens = num_used - self._num_reserved
            change = Change(self.slot, num_tokens=num_tokens, must_fit=False)
            self.store.give_back(self.limits, change)

    def _demand(self, generation: Generation, limit: int) -> int:
        """Returns the largest number of tokens that a request may use: the prompts' uncached
        tokens, and the maximum lengths of the answers.
        """
        request = generation.request
        firsts = generation.sequences[:: request.num_candidates]
        num_uncached = sum(
            len(first.prompt_token_ids) - self.num_cached_tokens(first) for first in firsts
        )
        longest = sum(sequence.sampling.max_tokens or 0 for sequence in generation.sequences)
        if request.sampling.max_tokens is None and request.default_max_tokens is None:
            usual = MAX_RESERVED_OUTPUT_TOKENS * len(generation.sequences)
            longest = min(longest, usual, max(limit - num_uncached, 1))
        return num_uncached + longest


def _kept_source(generation: Generation) -> KeptSource | None:
    """Returns the source that may continue to generate the answer after the request's end, if there
    is one.
    """
    if len(generation.finish_reasons()) == len(generation.choices):
        return None
    return generation.source


def _num_used(generation: Generation | None) -> int:
    if generation is None or not generation.was_taken:
        return 0
    usage = generation.usage()
    num_uncached = usage.num_prompt_tokens - usage.num_cached_tokens
    return num_uncached + usage.num_generated_tokens - generation.num_resumed_tokens


ALLOWANCE: ContextVar[Allowance | None] = ContextVar("allowance", default=None)
"""The Allowance of the request that the current task serves, or None without limits."""


def was_refused(error: StepwellError) -> bool:
    """Whether a request with this error does not count towards its tenant's requests per minute,
    because the client did not cause the error.
    """
    return isinstance(error, _NOT_THE_CLIENTS) and not isinstance(error, QuotaExceeded)
