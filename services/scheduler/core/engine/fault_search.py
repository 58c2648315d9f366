"""Searches the requests of failed steps for a request whose steps always fail."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request, RequestStatus

MAX_FAILURES_ALONE = 2
"""A suspect is ended after this number of failed steps that contained only this suspect."""
_ENDED = (RequestStatus.FINISHED, RequestStatus.WAITING_FOR_CHUNK)


@dataclass(frozen=True, slots=True)
class _Group:
    """Suspects that run together, while no other request runs."""

    requests: Sequence[Request]
    other_half_is_next: bool = False
    """Whether this group is the first half of a failed group, and the next group in the queue is
    the second half. If the steps of the first half succeed, the fault must be in the second half.
    """


class FaultSearch:
    """Finds requests whose steps always fail, by repeatedly halving the set of suspects.

    1. When a step fails, its requests become suspects. A suspect is cleared when it ends, when it
       is a session whose turn ends, or when successful steps have computed all its tokens up to the
       end of the failed step. After the first failure all requests continue to run, because most
       losses of workers have other causes.
    2. When a step with suspects fails again, its suspects are split into two groups. From then on
       only one group runs at a time, first the group with the earlier requests. The suspects of a
       group whose steps succeed are cleared. A group whose step fails is split again.
    3. A suspect ends with an error after `MAX_FAILURES_ALONE` failed steps that contain no other
       request. By then the suspect was in at least three failed steps in a row, so a request rarely
       ends because workers are killed for other reasons.

    This is group testing by binary splitting (Dorfman, 1943; Hwang, 1972).
    """

    def __init__(self) -> None:
        self._goals: dict[Request, int] = {}
        """Maps each suspect to the number of computed tokens that clears it."""
        self._groups: deque[_Group] = deque()
        self._failures_alone: Counter[Request] = Counter()

    @property
    def is_active(self) -> bool:
        return bool(self._goals)

    def trial(self) -> Sequence[Request] | None:
        """The only requests that may run now. None if all requests may run."""
        if not self._goals and not self._groups:
            return None
        for request in [request for request in self._goals if request.status in _ENDED]:
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
        """Records a successful step, which may clear suspects."""
        steps = zip(plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        for request, start, num_tokens in steps:
            goal = self._goals.get(request)
            if goal is not None and start + num_tokens >= goal:
                self._clear(request)

    def steps_failed(self, plans: Iterable[SchedulerOutput]) -> Request | None:
        """Records the steps that were in flight when the pool or the workers were lost. All
        requests of these steps become suspects, because it is not known which step failed. Returns
        the request that must end with an error, or None.
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
