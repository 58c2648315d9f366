"""The events of a step log, without the scheduler's decisions, as the input of a what-if run."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.ids import RequestKey
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import ObservedStep


@dataclass(frozen=True, slots=True)
class Abort:
    key: RequestKey
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Further input of a session (a request whose input arrives in several chunks). `chunk` is None
    if the client ends the session instead.
    """

    key: RequestKey
    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The grammar of a request was compiled. A failed compilation has a non-empty `error`."""

    key: RequestKey
    error: str
    reason: FinishReason
    """The finish reason of the request if the compilation failed."""


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The end of a turn (a request of a program, which is an agent's session): the tool that runs
    after the turn, and whether the program ends with it.
    """

    key: RequestKey
    tool: str
    ends: bool


Event = Request | NextChunk | EndTurn | Abort | GrammarCompiled | PauseMode | str
"""An added request, further input of a session, the end of a program's turn, an abort, the end of a
grammar compilation, a pause of the scheduler, or a name. The name is COMPLETE, or the name of a
scheduler method that concerns no single request: resume, forget_pool, preempt_all,
reset_prefix_cache or reset_encoder_cache.
"""
COMPLETE = "complete"
"""The event that the oldest step's output arrived without a step planned since the last output."""


class History:
    """The events of a log and the tokens of each request. A step's number is the number of steps
    planned before it. `before_plan` maps a step's number to the events before the step's plan.
    `before_update` maps a step's number to the events between the step's plan and the next output.
    """

    def __init__(self) -> None:
        self.num_plans = 0
        self.before_plan: dict[int, list[Event]] = defaultdict(list)
        self.before_update: dict[int, list[Event]] = defaultdict(list)
        self.requests: dict[RequestKey, Request] = {}
        """All requests. Their token ids are complete once the whole log has been read."""
        self.accepted: dict[RequestKey, dict[int, int]] = defaultdict(dict)
        """For each request, maps the number of tokens before a step with draft tokens to the number
        of draft tokens that the step accepted. For sessions, only output tokens are counted.
        """
        self.num_drafts: dict[RequestKey, dict[int, int]] = defaultdict(dict)
        """For each request, maps a number of tokens to the number of draft tokens that were
        proposed when the request had that many tokens. It is not used for sessions.
        """
        self.turns: dict[RequestKey, list[list[int]]] = {}
        """The output tokens of each turn of a session, including the last token of the turn."""
        self.throttled: set[int] = set()
        """The numbers of the steps for which the caller throttled prefills."""
        self.times: list[float] = []
        """The clock's time when each step was planned. Empty if the log has no times."""
        self.observed: dict[int, Sequence[ObservedStep]] = {}
        """Maps a step's number to earlier steps whose times became known just before its plan."""
        self.without_tokens: set[int] = set()
        """The numbers of the steps without scheduled requests. What-if runs have these steps too.
        """
        self._follows_plan = False

    def add(self, event: Event) -> None:
        if self._follows_plan:
            self.before_update[self.num_plans - 1].append(event)
        else:
            self.before_plan[self.num_plans].append(event)

    def add_plan(
        self,
        plan: SchedulerOutput,
        *,
        throttled: bool,
        now: float | None,
        observed: Sequence[ObservedStep],
    ) -> None:
        if now is not None:
            self.times.append(now)
        if observed:
            self.observed[self.num_plans] = observed
        if throttled:
            self.throttled.add(self.num_plans)
        if not plan.requests:
            self.without_tokens.add(self.num_plans)
        self.num_plans += 1
        self._follows_plan = True

    def add_update(self, update: EngineCoreOutputs, drafts: Sequence[Sequence[int]]) -> None:
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
