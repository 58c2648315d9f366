"""The search for a request whose steps always fail, among those that were in a failed step."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request

MAX_FAILURES_ALONE = 2
"""Failed steps with nothing but one suspect in them after which the suspect is given up."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Suspects that run together, and nothing beside them."""

    requests: Sequence[Request]
    other_half_is_next: bool = False
    """Whether the group behind is the other half of a group that failed: if this one passes, the
    fault must be in that one.
    """


class FaultSearch:
    """Finds the requests that break the steps they are in, by halving.

    1. When a step fails, the requests in it become suspects. A suspect is cleared when it gets past
       the tokens that it had in the failed step, or ends. After one failure all run on as before:
       most often the workers were lost for a reason of their own.
    2. When a step with suspects fails again, the suspects of that step are split in two, and from
       here on one group runs at a time, the requests that arrived first before the others. A group
       that passes is cleared; one that fails is split again.
    3. A suspect whose steps failed `MAX_FAILURES_ALONE` times with no other request in them is
       given up. That takes three failures in a row at one place of one request, so that workers
       that are killed for other reasons do not end it.

    Group testing by binary splitting is Dorfman's (1943) and Hwang's (1972).
    """

    def __init__(self) -> None:
        self._goals: dict[Request, int] = {}
        """Suspects, and how many computed tokens clear each of them."""
        self._groups: deque[_Group] = deque()
        self._failures_alone: Counter[Request] = Counter()

    @property
    def is_active(self) -> bool:
        """Whether there are suspects."""
        return bool(self._goals)

    def trial(self) -> Sequence[Request] | None:
        """The only requests that may run now: the same ones until all of them are cleared. None
        when every request may.
        """
        if not self._goals and not self._groups:
            return None
        for request in [request for request in self._goals if request.is_finished]:
            self._clear(request)
        while self._groups:
            group = self._groups[0]
            if any(request in self._goals for request in group.requests):
                return group.requests
            self._groups.popleft()
            if group.other_half_is_next and self._groups:
                self._split_first()
        return None

    def step_done(self, plan: SchedulerOutput) -> None:
        """A step came back: clears the suspects in it that are past the failed one."""
        steps = zip(plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        for request, start, num_tokens in steps:
            goal = self._goals.get(request)
            if goal is not None and start + num_tokens >= goal:
                self._clear(request)

    def steps_failed(self, plans: Iterable[SchedulerOutput]) -> Request | None:
        """Steps were lost with pool or workers; returns the request that is to be given up, if one
        is.

        Which of several steps in flight broke the workers is not known: all of their requests
        count.
        """
        failed = self._failed(plans)
        known = [request for request in failed if request in self._goals]
        if not known:
            self._goals |= failed
            return None
        if self._groups:
            absent = [
                request for request in self._groups.popleft().requests if request not in known
            ]
            if absent:
                self._groups.appendleft(_Group(absent))
        else:
            self._goals = {request: self._goals[request] for request in known}
        self._groups.appendleft(_Group(sorted(known, key=lambda request: request.key)))
        if len(failed) > 1:
            self._split_first()
            return None
        (suspect,) = known
        self._failures_alone[suspect] += 1
        if self._failures_alone[suspect] < MAX_FAILURES_ALONE:
            return None
        self._clear(suspect)
        return suspect

    def _failed(self, plans: Iterable[SchedulerOutput]) -> dict[Request, int]:
        failed: dict[Request, int] = {}
        for plan in plans:
            starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
            for request, start, num_tokens in zip(plan.requests, starts, counts, strict=True):
                if not request.is_finished:
                    failed[request] = max(failed.get(request, 0), start + num_tokens)
        return failed

    def _split_first(self) -> None:
        requests = self._groups[0].requests
        if len(requests) > 1:
            self._groups.popleft()
            middle = len(requests) // 2
            self._groups.appendleft(_Group(requests[middle:]))
            self._groups.appendleft(_Group(requests[:middle], other_half_is_next=True))

    def _clear(self, request: Request) -> None:
        self._goals.pop(request, None)
        self._failures_alone.pop(request, None)
