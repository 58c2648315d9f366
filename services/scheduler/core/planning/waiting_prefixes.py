"""The prefix of each waiting request in a step: how many of its tokens are cached, and how many
more a connector loads.
"""

from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.engine.planned_steps import PlannedSteps
from services.scheduler.core.request import Request


@dataclass(slots=True)
class WaitingPrefixes:
    """What the pool and a connector answered to lookups of prefixes, after the admissions so
    far.
    """

    hits: dict[Request, int] = field(default_factory=dict)
    """Number of cached tokens of each request, from the pool's latest answer."""
    external: dict[Request, int] = field(default_factory=dict)
    """Number of tokens after a request's hit that a connector loads."""
    divergent_hits: dict[Request, int] = field(default_factory=dict)
    """Number of tokens of a request that are cached for the full-attention layers. Only if a
    connector supplies the states of the other layers.
    """
    diverging: set[Request] = field(default_factory=set)
    """Requests whose hit counts the tokens cached for full-attention layers only."""
    num_stored: dict[Request, int] = field(default_factory=dict)
    """Number of tokens from which the sliding windows of a request are computed. Only for requests
    where this number is less than the number of computed tokens.
    """
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish. Later admissions of the step can hit them."""

    _cut_hits: dict[Request, int] = field(default_factory=dict)

    def note_hit(self, request: Request, num_tokens: int, shared_prefix_boundary: int) -> None:
        """Stores the pool's answer for a request."""
        self.hits[request] = num_tokens
        request.shared_prefix_boundary = shared_prefix_boundary

    def cut_hit(self, request: Request, num_tokens: int) -> None:
        """Cuts a hit to whole blocks, because the connector loads the tokens after them and the
        states.
        """
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
        """Records the computed tokens of a request that holds blocks as its hit.

        Steps of a session's last turn may still be in flight. Their tokens are dropped, but they
        read the blocks of the sliding windows. Then the windows are computed from fewer tokens, so
        that these blocks are not freed.
        """
        self.hits[request] = request.num_computed_tokens
        if any(request in plan.requests for plan in steps.in_flight):
            in_flight = steps.num_tokens()(request)
            self.num_stored[request] = max(0, request.num_computed_tokens - in_flight)
