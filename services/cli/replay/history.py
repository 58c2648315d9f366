"""The events of a step log without the scheduler's decisions: the input of a what-if."""

from collections import defaultdict
from dataclasses import dataclass

from services.common.finish_reason import FinishReason
from services.common.ids import RequestKey
from services.scheduler.core.output import EngineCoreOutputs
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that was aborted."""

    key: RequestKey
    reason: FinishReason


Event = Request | Abort | str
"""A request as it was added, an abort, or a scheduler's method that concerns no single request:
forget_pool, preempt_all, reset_prefix_cache.
"""


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
        """Accepted drafts of a request, by how many tokens it had when they were verified."""
        self._follows_plan = False

    def add(self, event: Event) -> None:
        if self._follows_plan:
            self.before_update[self.num_plans - 1].append(event)
        else:
            self.before_plan[self.num_plans].append(event)

    def add_plan(self) -> None:
        self.num_plans += 1
        self._follows_plan = True

    def add_update(self, update: EngineCoreOutputs) -> None:
        """The scheduler was updated with the tokens of a step."""
        self._follows_plan = False
        if not update.plan.draft_token_ids:
            return
        for news in update:
            num_tokens = news.request.num_tokens - len(news.token_ids)
            self.accepted[news.request.key][num_tokens] = max(0, len(news.token_ids) - 1)
