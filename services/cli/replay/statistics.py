"""Statistics of a run, with one sample for each step and one account for each request. Times are
counted in steps. A scheduled token is *prefill* if the request arrived with it, *decode* if it was
generated, *draft* if it is a draft token, and *recomputed* if its position was computed before.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput, WaitReason
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request


@dataclass(slots=True)
class StepSample:
    """One step: the queues and the pool after planning, and the scheduled tokens of each kind."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_preemptions: int
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0


@dataclass(slots=True)
class RequestAccount:
    """The times and tokens of one request. Times are numbers of steps since `arrived`."""

    arrived: int
    num_initial_tokens: int
    num_computed_tokens: int = 0
    """The largest number of computed tokens so far, without draft tokens."""
    queued_steps: int | None = None
    first_token_steps: int | None = None
    """Number of steps up to the step that sampled the first token. None before that step."""


class RunStatistics:
    def __init__(self, scheduler: Scheduler) -> None:
        self.config = scheduler.config
        self.samples: list[StepSample] = []
        self.accounts: dict[Request, RequestAccount] = {}
        self.num_refused = 0
        """The number of requests that were rejected as too long for the configuration."""
        self.num_hit_tokens = 0
        self.num_query_tokens = 0
        """The number of tokens of requests at their first admission, by which hits are divided."""
        self.num_generated_tokens = 0
        self.wait_steps: Counter[WaitReason] = Counter()
        """Maps a wait reason to the number of requests with that reason, summed over all steps."""
        self._scheduler = scheduler
        self._made_at: dict[int, int] = {}
        self._num_sampled_preemptions = 0

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions of running requests for any reason: for another request, after
        the loss of a pool or worker, or by an operator.
        """
        return self._scheduler.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """The number of tokens that were computed more than once."""
        return sum(sample.num_recomputed_tokens for sample in self.samples)

    @property
    def hit_rate(self) -> float:
        """The fraction of the requests' tokens that were prefix hits at the first admission."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0

    @property
    def queued_steps(self) -> list[int]:
        """For each request that was scheduled, the number of steps that it waited in the queue."""
        steps = (account.queued_steps for account in self.accounts.values())
        return [count for count in steps if count is not None]

    @property
    def first_token_steps(self) -> list[int]:
        """For each request with a first token, the number of steps until that token."""
        steps = (account.first_token_steps for account in self.accounts.values())
        return [count for count in steps if count is not None]

    def arrived(self, request: Request, now: int) -> None:
        """Must be called when a request arrives. `now` is the number of steps planned before."""
        self.accounts[request] = RequestAccount(now, request.num_tokens)

    def planned(self, plan: SchedulerOutput, now: int) -> None:
        self._made_at[plan.step] = now
        for request in plan.new:
            account = self.accounts[request]
            account.num_initial_tokens = max(account.num_initial_tokens, request.num_prompt_tokens)
            if account.queued_steps is None:
                account.queued_steps = now - account.arrived
                self.num_hit_tokens += request.num_cached_tokens or 0
                self.num_query_tokens += request.num_tokens
        if plan.wait_reason is not None:
            self.wait_steps[plan.wait_reason] += len(self._scheduler.queues.waiting)
        sample = StepSample(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.queues.waiting),
            num_used_blocks=self.config.num_blocks
            - 1
            - self._scheduler.kv_cache_manager.num_free_blocks,
            num_preemptions=self._unsampled_preemptions(),
        )
        self._count_tokens(plan, sample)
        self.samples.append(sample)

    def preempted(self) -> None:
        """Must be called after preemptions that no plan made. Adds them to the last sample."""
        if self.samples:
            self.samples[-1].num_preemptions += self._unsampled_preemptions()

    def updated(self, update: EngineCoreOutputs) -> None:
        now = self._made_at.pop(update.plan.step)
        for news in update:
            self.num_generated_tokens += len(news.token_ids)
            account = self.accounts[news.request]
            if news.token_ids and account.first_token_steps is None:
                account.first_token_steps = now + 1 - account.arrived

    def _unsampled_preemptions(self) -> int:
        before, self._num_sampled_preemptions = self._num_sampled_preemptions, self.num_preemptions
        return self.num_preemptions - before

    def _count_tokens(self, plan: SchedulerOutput, sample: StepSample) -> None:
        for request, start, scheduled in zip(
            plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            account = self.accounts[request]
            drafts = len(plan.draft_token_ids.get(request, ()))
            end = start + scheduled - drafts
            fresh = max(start, min(end, account.num_computed_tokens))
            generated = max(fresh, min(end, account.num_initial_tokens))
            sample.num_recomputed_tokens += fresh - start
            sample.num_prefill_tokens += generated - fresh
            sample.num_decode_tokens += end - generated
            sample.num_draft_tokens += drafts
            account.num_computed_tokens = max(end, account.num_computed_tokens)


def percentile(values: Sequence[int], share: float) -> int | None:
    """The nearest-rank percentile for the fraction `share`. None if there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def middle(values: Sequence[int]) -> float | None:
    """The median, or None if there are no values."""
    return median(values) if values else None
