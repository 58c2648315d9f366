"""Prefixes of waiting requests in a step: tokens that are cached, and tokens to be loaded."""

from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.engine.planned_steps import PlannedSteps
from services.scheduler.core.request import Request


@dataclass(slots=True)
class WaitingPrefixes:
    """Lookup results of the pool and of a connector, after the admissions so far."""

    hits: dict[Request, int] = field(default_factory=dict)
    """Number of cached tokens, from the pool's latest answer."""
    external: dict[Request, int] = field(default_factory=dict)
    """Number of tokens after the hit that a connector loads."""
    divergent_hits: dict[Request, int] = field(default_factory=dict)
    """Number of tokens cached for full attention, where the connector supplies states."""
    diverging: set[Request] = field(default_factory=set)
    """Requests whose hit counts full attention only."""
    num_stored: dict[Request, int] = field(default_factory=dict)
    """Number of tokens from which the windows of a request are computed. Only for requests where
    it is less than the number of computed tokens.
    """
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish. Later admissions of the step can hit them."""

    _cut_hits: dict[Request, int] = field(default_factory=dict)

    def note_hit(self, request: Request, num_tokens: int, shared_prefix_boundary: int) -> None:
        """Stores the pool's answer for a request."""
        self.hits[request] = num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary

    def cut_hit(self, request: Request, num_tokens: int) -> None:
        """Cuts a hit to whole blocks: the tokens after them are loaded, states included."""
        self.hits[request] = num_tokens
        self.diverging.add(request)
        self._cut_hits[request] = num_tokens

    def max_hit_tokens(self, request: Request) -> int:
        """The longest hit, in tokens, that a request may use."""
        return self._cut_hits.get(request, request.max_hit_tokens)

    def forget_hits(self) -> None:
        """Removes the known hits, because an admission may have changed them."""
        self.hits.clear()
        self._cut_hits.clear()
        self.divergent_hits.clear()
        self.diverging.clear()

    def go_on(self, request: Request, steps: PlannedSteps) -> None:
        """Records the computed tokens of a request that holds blocks as its hit. If steps of a
        session's last turn are in flight, the windows are computed from fewer tokens: the steps,
        whose tokens are dropped, still read the windows' blocks.
        """
        self.hits[request] = request.num_computed_tokens
        if any(request in plan.requests for plan in steps.in_flight):
            in_flight = steps.num_tokens()(request)
            self.num_stored[request] = max(0, request.num_computed_tokens - in_flight)
