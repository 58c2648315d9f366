"""Prefixes of waiting requests in a step: the tokens that are cached, and those that are loaded."""

from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.engine.planned_steps import PlannedSteps
from services.scheduler.core.request import Request


@dataclass(slots=True)
class WaitingPrefixes:
    """Answers of the pool and of a connector, as of the admissions so far."""

    hits: dict[Request, int] = field(default_factory=dict)
    """Cached tokens, by the pool's newest answer."""
    external: dict[Request, int] = field(default_factory=dict)
    """Tokens that a connector loads behind the hits."""
    divergent_hits: dict[Request, int] = field(default_factory=dict)
    """Tokens that full attention has cached, where the connector supplies states."""
    diverging: set[Request] = field(default_factory=set)
    """Requests whose hit is one of full attention alone."""
    num_stored: dict[Request, int] = field(default_factory=dict)
    """Tokens up to which the windows of requests move on, if not up to all computed ones."""
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish: later admissions of the step hit them."""

    _cut_hits: dict[Request, int] = field(default_factory=dict)

    def note_hit(self, request: Request, num_tokens: int, shared_prefix_boundary: int) -> None:
        """Keeps the pool's answer."""
        self.hits[request] = num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary

    def cut_hit(self, request: Request, num_tokens: int) -> None:
        """Cuts a hit to whole blocks: the tokens after them are loaded, states included."""
        self.hits[request] = num_tokens
        self.diverging.add(request)
        self._cut_hits[request] = num_tokens

    def max_hit_tokens(self, request: Request) -> int:
        """The longest hit that a request may take."""
        return self._cut_hits.get(request, request.max_hit_tokens)

    def forget_hits(self) -> None:
        """Drops the known hits, after an admission has changed them."""
        self.hits.clear()
        self._cut_hits.clear()
        self.divergent_hits.clear()
        self.diverging.clear()

    def go_on(self, request: Request, steps: PlannedSteps) -> None:
        """Notes the computed tokens of a request that holds blocks. Steps in flight of a session's
        last turn, whose tokens are dropped, still read the blocks that its windows see.
        """
        self.hits[request] = request.num_computed_tokens
        if any(request in plan.requests for plan in steps.in_flight):
            in_flight = steps.num_tokens()(request)
            self.num_stored[request] = max(0, request.num_computed_tokens - in_flight)
