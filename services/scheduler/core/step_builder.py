"""A step while it is planned: the budget left, what was scheduled, and what can be taken back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash
from services.common.ids import BlockId
from services.common.pool_operations import BlockTables
from services.scheduler.core.computed_tokens import num_computed_tokens_of
from services.scheduler.core.output import Preemption, SchedulerOutput, WaitReason
from services.scheduler.core.request import Request


@dataclass(slots=True)
class StepBuilder:
    """Collects a step's `SchedulerOutput`. The first three lists are parallel, in the
    order of scheduling.
    """

    token_budget: int
    """Tokens left."""
    long_prefill_token_threshold: int
    """Most tokens of one request in this step; 0: no such limit."""
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Before the step."""
    off_fast_path: dict[Request, int] = field(default_factory=dict)
    """Scheduled tokens of the requests that are not on the fast path."""
    appended_blocks: dict[Request, BlockTables] = field(default_factory=dict)
    block_tables: dict[Request, BlockTables] = field(default_factory=dict)
    draft_token_ids: dict[Request, list[int]] = field(default_factory=dict)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    hits: dict[Request, int] = field(default_factory=dict)
    """Cached tokens of waiting requests, by the pool's newest answer."""
    published: set[BlockHash] = field(default_factory=set)
    """Hashes that admissions of this step publish: later admissions of the step hit them."""

    @property
    def has_running_requests(self) -> bool:
        """Whether a request that ran before this step is scheduled."""
        return len(self.requests) > len(self.block_tables)

    @property
    def has_prefill_chunks(self) -> bool:
        """Whether a request that ran before this step computes a further chunk of its prompt."""
        return any(request.is_prefill_chunk for request in self.off_fast_path)

    def cap(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens the threshold lets one request have."""
        threshold = self.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    def schedule_one_token_each(self, requests: Sequence[Request]) -> None:
        """Schedules one token of each of these requests."""
        self.requests += requests
        self.num_scheduled_tokens += [1] * len(requests)
        self.num_computed_tokens += num_computed_tokens_of(requests)
        self.token_budget -= len(requests)

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Schedules tokens of a request off the fast path; its drafts are the last of them."""
        num_computed_tokens = request.num_computed_tokens
        self.requests.append(request)
        self.num_scheduled_tokens.append(num_tokens)
        self.num_computed_tokens.append(num_computed_tokens)
        self.off_fast_path[request] = num_tokens
        self.token_budget -= num_tokens
        if request.draft_token_ids:
            known = len(request.token_ids) + request.num_output_placeholders
            num_drafts = num_computed_tokens + num_tokens - known
            if num_drafts > 0:
                self.draft_token_ids[request] = request.draft_token_ids[:num_drafts]

    def unschedule_from(self, request: Request) -> int:
        """Takes back the tokens of a request and of all that were scheduled after it. Returns the
        tokens that were scheduled of the request.
        """
        index = self.requests.index(request)
        num_tokens = self.num_scheduled_tokens[index]
        self.token_budget += sum(self.num_scheduled_tokens[index:])
        for unscheduled in self.requests[index:]:
            self._forget(unscheduled)
        del self.requests[index:], self.num_scheduled_tokens[index:]
        del self.num_computed_tokens[index:]
        return num_tokens

    def unschedule(self, request: Request) -> None:
        """Takes back the tokens of a request, if any were scheduled."""
        if request in self.requests:
            index = self.requests.index(request)
            self.token_budget += self.num_scheduled_tokens.pop(index)
            del self.requests[index], self.num_computed_tokens[index]
            self.appended_blocks.pop(request, None)
            self._forget(request)

    def build(
        self,
        step: int,
        wait_reason: WaitReason | None,
        removed_rows: list[int],
        block_ids_to_zero: list[BlockId],
    ) -> SchedulerOutput:
        """The step, planned."""
        return SchedulerOutput(
            step=step,
            requests=self.requests,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_tables=self.block_tables,
            appended_blocks=self.appended_blocks,
            draft_token_ids=self.draft_token_ids,
            new=self.new,
            resumed=self.resumed,
            preemptions=self.preemptions,
            wait_reason=wait_reason,
            removed_rows=removed_rows,
            block_ids_to_zero=block_ids_to_zero,
        )

    def _forget(self, request: Request) -> None:
        self.draft_token_ids.pop(request, None)
        self.off_fast_path.pop(request, None)
