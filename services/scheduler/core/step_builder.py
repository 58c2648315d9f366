"""A step while it is being planned: the budget left, the grants made, what may still be undone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash
from services.common.pool_operations import BlockTables
from services.scheduler.core.output import Preemption
from services.scheduler.core.request import Request


@dataclass(slots=True)
class StepBuilder:
    """The token budget of one step and who got what of it, in scheduling order."""

    budget: int
    """Tokens left."""
    threshold: int
    """Most tokens of one request in this step; 0: no such limit."""
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Tokens computed before the step; parallel, as are the two above."""
    awake: dict[Request, int] = field(default_factory=dict)
    """What those got that do not decode in stride."""
    appended: dict[Request, BlockTables] = field(default_factory=dict)
    tables: dict[Request, BlockTables] = field(default_factory=dict)
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    hits: dict[Request, int] = field(default_factory=dict)
    """Cached tokens of waiting requests, as the pool last said."""
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish: later ones will hit them."""

    @property
    def runs_any(self) -> bool:
        """Whether a request that ran before this step has a part in it."""
        return len(self.requests) > len(self.tables)

    @property
    def runs_prefill(self) -> bool:
        """Whether the step computes a further chunk of somebody's prompt."""
        return any(request.is_prefill_chunk for request in self.awake)

    def cap(self, gap: int) -> int:
        """How many of `gap` missing tokens the threshold lets one request have."""
        return self.threshold if 0 < self.threshold < gap else gap

    def grant_each(self, requests: Sequence[Request]) -> None:
        """Gives one token of the budget to each of these."""
        self.requests += requests
        self.num_tokens += [1] * len(requests)
        self.starts += [request.origin + request.clock.now for request in requests]
        self.budget -= len(requests)

    def grant(self, request: Request, num_tokens: int) -> None:
        """Gives tokens of the budget to a request; drafts go last."""
        self.requests.append(request)
        self.num_tokens.append(num_tokens)
        self.starts.append(request.num_computed_tokens)
        self.awake[request] = num_tokens
        self.budget -= num_tokens
        if request.draft_token_ids:
            known = len(request.token_ids) + request.num_output_placeholders
            num_drafts = request.num_computed_tokens + num_tokens - known
            if num_drafts > 0:
                self.draft_token_ids[request] = request.draft_token_ids[:num_drafts]

    def revoke_from(self, request: Request) -> int:
        """Takes back what was given to a request and to all after it; returns the tokens that the
        request was given.
        """
        index = self.requests.index(request)
        num_tokens = self.num_tokens[index]
        self.budget += sum(self.num_tokens[index:])
        for revoked in self.requests[index:]:
            self._forget(revoked)
        del self.requests[index:], self.num_tokens[index:], self.starts[index:]
        return num_tokens

    def revoke(self, request: Request) -> None:
        """Takes back what was given to a request, if anything."""
        if request in self.requests:
            index = self.requests.index(request)
            self.budget += self.num_tokens.pop(index)
            del self.requests[index], self.starts[index]
            self.appended.pop(request, None)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.draft_token_ids.pop(request, None)
        self.awake.pop(request, None)
