"""What-if runs, which schedule the arrivals of a log with other settings.

Time is counted in steps, including steps of the log that scheduled nothing. Requests arrive and are
aborted at the same steps as in the log. Whenever a step computes a request's last token, the next
token of the log is appended to the request. If the log verified draft tokens when the request had
this number of tokens, as many are accepted as in the log. A policy that uses times sees the logged
times: a step is planned at the time of the log's step with the same number. If the log aborts a
request, arbitrary tokens follow its logged tokens until the abort. They also follow if the log's
scheduler ended the request with an error, until the scheduler ends it here, too. If a request does
not end in the log, it is aborted at its last logged token.
"""

from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

from services.cli.errors import CommandError
from services.cli.replay.history import COMPLETE, EndTurn, Event, History
from services.cli.replay.scheduler_run import SchedulerRun
from services.cli.replay.statistics import RunStatistics
from services.cli.replay.step_records import Write
from services.common.errors import StepwellError
from services.common.pool.ids import RequestKey
from services.common.request.finish import FinishReason
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.capacity import config_conflict, max_request_tokens
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.policies import retains_contexts
from services.scheduler.core.request import Request, RequestStatus
from services.simulation.inprocess_pool import InProcessPool


def changed_config(config: SchedulerConfig, overrides: dict[str, Any]) -> SchedulerConfig:
    """The configuration with the settings in `overrides`. `max_model_len` is reduced to the length
    that the pool can store. Raises CommandError if the configuration could not serve any request,
    or if its policy needs times that the log does not have.
    """
    if overrides.get("num_speculative_tokens", 0) > config.num_speculative_tokens:
        raise CommandError(
            "--set num_speculative_tokens cannot exceed the log's value: the log does not have "
            "the further drafts"
        )
    changed = replace(config, **overrides)
    if retains_contexts(changed.policy) and not retains_contexts(config.policy):
        raise CommandError(
            f"--set policy={changed.policy} needs the times of steps: only logs of policies "
            "that retain contexts have these times"
        )
    groups = tuple(replace(group, block_size=changed.block_size) for group in changed.groups)
    changed = replace(changed, groups=groups)
    changed = replace(changed, max_model_len=max_request_tokens(changed))
    if conflict := config_conflict(changed):
        raise CommandError(conflict)
    return changed


async def what_if(
    history: History, config: SchedulerConfig, write: Write | None = None
) -> RunStatistics:
    """Runs the history with another configuration. Passes the records of the steps to `write`.
    Raises CommandError if the pool is not possible, or if the scheduler has a KV connector, because
    the log does not show which loads would be possible with other settings.
    """
    if config.kv_role is not None:
        raise CommandError("--set cannot be used on a log of a scheduler with a KV connector")
    try:
        run = WhatIf(history, config, write)
    except StepwellError as error:
        raise CommandError(f"these settings allow no pool: {error.message}") from None
    return await run.run()


class WhatIf(SchedulerRun):
    def __init__(
        self, history: History, config: SchedulerConfig, write: Write | None = None
    ) -> None:
        pool = InProcessPool(config)
        super().__init__(Scheduler(config, pool, clock=self._time), pool, write)
        self._history = history
        self._depth = config.num_steps_in_flight
        self._now = 0
        self._turns: Counter[RequestKey] = Counter()
        """For each request with several inputs (a session), the number of answered inputs."""
        self._early: list[EndTurn] = []
        """Events of turns that have ended in the log, but whose requests still run here."""

    async def run(self) -> RunStatistics:
        """Runs until all events are applied and all requests have ended."""
        num_plans = self._history.num_plans
        while self._now <= num_plans or self.in_flight or self.scheduler.has_requests:
            await self._step(is_last=self._now > num_plans)
            self._now += 1
        return self.statistics

    async def _step(self, *, is_last: bool) -> None:
        early, self._early = self._early, []
        for event in (*early, *self._history.before_plan.get(self._now, ())):
            await self.apply(event, self._now)
        for step in self._history.observed.get(self._now, ()):
            self.scheduler.step_costs.observe(*step)
        plan = None
        if self.scheduler.has_requests or self._now in self._history.without_tokens:
            throttled = self._now in self._history.throttled
            plan = await self.schedule(self._now, throttled=throttled)
            if plan.requests or plan.removed_rows:
                self.in_flight[plan.step] = plan
        for event in self._history.before_update.get(self._now, ()):
            await self.apply(event, self._now + 1)
        planned = plan is not None and bool(plan.requests)
        if self.in_flight and (len(self.in_flight) >= self._depth or not planned):
            self._complete()
        elif self.scheduler.end_failed() or planned:
            return
        elif is_last and self.scheduler.has_requests:
            raise CommandError(
                f"with these settings {len(self.scheduler.queues.waiting)} requests would wait for "
                "ever: the first one in the queue does not fit in the pool"
            )

    async def apply(self, event: Event, now: int) -> None:
        """Makes an event's call of the scheduler. Requests that are too long for the configuration
        are only counted. The end of a turn waits until the turn's request has ended.
        """
        if event == COMPLETE:
            self._complete()
        elif isinstance(event, Request) and event.num_tokens > self.scheduler.config.max_prompt_len:
            self.statistics.num_refused += 1
        elif isinstance(event, EndTurn) and self._has_not_ended(event.key):
            self._early.append(event)
        else:
            await super().apply(event, now)

    def _has_not_ended(self, key: RequestKey) -> bool:
        return key in self.requests and not self.requests[key].is_finished

    def _time(self) -> float:
        """The log's time of this step. Steps after the log's end take the log's mean step time."""
        times = self._history.times
        num_more = self._now - len(times) + 1
        if num_more <= 0:
            return times[self._now]
        return times[-1] + num_more * (times[-1] - times[0]) / len(times) if times else 0.0

    def _complete(self) -> None:
        if self.in_flight:
            self._update(self.in_flight.pop(min(self.in_flight)))

    def _update(self, plan: SchedulerOutput) -> None:
        config = self.scheduler.config
        if config.pooling:
            self.statistics.updated(self.scheduler.update_from_output(plan, pooled_output(plan)))
            return
        tokens = [self._tokens(plan, index) for index in range(len(plan.requests))]
        drafts = [
            self._drafts(request, sampled)
            for request, sampled in zip(plan.requests, tokens, strict=True)
        ]
        output = ModelRunnerOutput(
            tokens, draft_token_ids=drafts if config.num_speculative_tokens else ()
        )
        update = self.scheduler.update_from_output(plan, output)
        self.statistics.updated(update)
        self._turns.update(request.key for request in update.turns)
        for request in plan.requests:
            if not request.is_finished and self._is_ahead(request):
                self.scheduler.abort(request)

    def _is_ahead(self, request: Request) -> bool:
        """Whether a request needs tokens beyond its last token in the log."""
        if self._ends_otherwise(request) or request.status is RequestStatus.WAITING_FOR_CHUNK:
            return False
        return not self._next_tokens(request)

    def _tokens(self, plan: SchedulerOutput, index: int) -> list[int]:
        """The tokens that a step samples for a request, if it computes the request's last token."""
        request = plan.requests[index]
        num_drafts = len(plan.draft_token_ids.get(request, ()))
        end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index] - num_drafts
        if end < request.num_tokens:
            return []
        accepted = self._history.accepted[request.key].get(self._num_tokens(request), 0)
        sampled = self._next_tokens(request)[: min(accepted, num_drafts) + 1]
        if sampled or not self._ends_otherwise(request):
            return sampled
        return [next(token for token in count() if token not in request.ending_token_ids)]

    def _next_tokens(self, request: Request) -> list[int]:
        """The logged tokens after the request's current tokens, up to the end of its turn."""
        if not request.resumable:
            return self._history.requests[request.key].token_ids[request.num_tokens :]
        turns, turn = self._history.turns.get(request.key, []), self._turns[request.key]
        return turns[turn][request.num_output_tokens :] if turn < len(turns) else []

    def _num_tokens(self, request: Request) -> int:
        """The request's number of tokens, as counted by the keys of `History.accepted`."""
        if not request.resumable:
            return request.num_tokens
        turns = self._history.turns.get(request.key, [])[: self._turns[request.key]]
        return sum(map(len, turns)) + request.num_output_tokens

    def _drafts(self, request: Request, sampled: list[int]) -> list[int]:
        """As many placeholders for draft tokens as the log has drafts at this number of tokens."""
        if not sampled:
            return []
        most = self.scheduler.config.num_speculative_tokens
        logged = self._history.num_drafts[request.key]
        return [-1] * min(most, logged.get(request.num_tokens + len(sampled), most))

    def _ends_otherwise(self, request: Request) -> bool:
        """Whether the request's logged end was not decided by its tokens."""
        return self._history.requests[request.key].finish_reason in _ENDS_WITHOUT_TOKENS


def pooled_output(plan: SchedulerOutput) -> ModelRunnerOutput:
    """The output of a pooling model for one step, with None in place of each vector."""
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    ends = (start + count for start, count in zip(starts, counts, strict=True))
    pooled = [
        index
        for index, (request, end) in enumerate(zip(plan.requests, ends, strict=True))
        if end >= request.num_tokens
    ]
    return ModelRunnerOutput([()] * len(plan.requests), pooled=dict.fromkeys(pooled))


_ENDS_WITHOUT_TOKENS = {
    FinishReason.ABORT,
    FinishReason.QUEUE_TIMEOUT,
    FinishReason.STEP_FAILED,
    FinishReason.ERROR,
}
"""Finish reasons of requests that an event or an error ended, whatever their tokens."""
