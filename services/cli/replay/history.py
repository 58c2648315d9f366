"""The events of a step log without the scheduler's decisions: the input of a what-if."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.ids import RequestKey
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish_reason import FinishReason
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that was aborted."""

    key: RequestKey
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Further input of a session; None ends it."""

    key: RequestKey
    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The grammar of a request is compiled, or cannot be."""

    key: RequestKey
    error: str
    reason: FinishReason
    """How the request ends for an error."""


Event = Request | NextChunk | Abort | GrammarCompiled | PauseMode | str
"""A request as it was added, further input of a session, an abort, the end of a compilation, a
pause, or a scheduler's method that concerns no single request: resume, forget_pool, preempt_all,
reset_prefix_cache, reset_encoder_cache. COMPLETE is none of them.
"""
COMPLETE = "complete"
"""The tokens of the oldest step in flight came, though no step had been planned since the last."""


class History:
    """Events by step (the number of steps planned before), and the tokens of each request. Events
    between a plan and the next update belong to the plan's own step, after it.
    """

    def __init__(self) -> None:
        self.num_plans = 0
        self.before_plan: dict[int, list[Event]] = defaultdict(list)
        self.before_update: dict[int, list[Event]] = defaultdict(list)
        self.requests: dict[RequestKey, Request] = {}
        """Their tokens are complete once the log has been read."""
        self.accepted: dict[RequestKey, dict[int, int]] = defaultdict(dict)
        """Accepted drafts of a request, by how many tokens it had when they were verified; those of
        a session by how many it had been given.
        """
        self.num_drafts: dict[RequestKey, dict[int, int]] = defaultdict(dict)
        """How many drafts were proposed of a request that is no session, by how many tokens it had
        then.
        """
        self.turns: dict[RequestKey, list[list[int]]] = {}
        """Output of each turn of a session, its last token included."""
        self.throttled: set[int] = set()
        """Steps whose caller let prompts wait."""
        self.without_tokens: set[int] = set()
        """Steps that computed nothing: the time of one passed."""
        self._follows_plan = False

    def add(self, event: Event) -> None:
        if self._follows_plan:
            self.before_update[self.num_plans - 1].append(event)
        else:
            self.before_plan[self.num_plans].append(event)

    def add_plan(self, plan: SchedulerOutput, *, throttled: bool) -> None:
        if throttled:
            self.throttled.add(self.num_plans)
        if not plan.requests:
            self.without_tokens.add(self.num_plans)
        self.num_plans += 1
        self._follows_plan = True

    def add_update(self, update: EngineCoreOutputs, drafts: Sequence[Sequence[int]]) -> None:
        """The scheduler was updated with the tokens of a step, and drafts for the next one."""
        if not self._follows_plan:
            self.add(COMPLETE)
        self._follows_plan = False
        requests = update.plan.requests
        for request, tokens, proposed in zip(requests, update.token_ids, drafts, strict=False):
            if tokens:
                self.num_drafts[request.key][request.num_tokens] = len(proposed)
        for news in update:
            request, tokens = news.request, news.token_ids
            num_tokens = request.num_tokens - len(tokens)
            if request.resumable:
                turns = self.turns.setdefault(request.key, [[]])
                num_tokens = sum(map(len, turns))
                turns[-1] += tokens
                if request in update.turns:
                    turns.append([])
            if update.plan.draft_token_ids:
                self.accepted[request.key][num_tokens] = max(0, len(tokens) - 1)
