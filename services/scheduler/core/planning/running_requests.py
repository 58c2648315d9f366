"""The running requests, and which of them the next step must examine.

Most running requests decode: each step computes one more token of each request. While nothing else
about a request changes, it is on the *fast path*: steps schedule it without examining it, and do
not update its attributes. Its number of computed tokens is then the sum of `origin`, an attribute
of the request, and a clock that all requests on the fast path share. Planning a step advances the
clock, and so increases the number for each of them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter

from services.scheduler.core.computed_tokens import STOPPED, StepClock
from services.scheduler.core.request import Request

_admission_number = attrgetter("admission_number")


class RunningRequests:
    """The running requests, in the order of their admission. It is known in advance for how many
    steps a request stays on the fast path. A calendar (a timing wheel: Varghese and Lauck, 1987)
    maps each step to the requests that leave the fast path before that step.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._requests: list[Request] = []
        self._admission_numbers: list[int] = []
        self._next_admission_number = count()
        self._off_fast_path: set[Request] = set()
        self._calendar: defaultdict[int, set[Request]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def between(self, begin: int, end: int) -> Sequence[Request]:
        return self._requests[begin:end]

    def index(self, request: Request) -> int:
        return bisect_left(self._admission_numbers, request.admission_number)

    def append(self, request: Request) -> None:
        """Adds a request at the end, off the fast path."""
        request.admission_number = next(self._next_admission_number)
        self._requests.append(request)
        self._admission_numbers.append(request.admission_number)
        self._off_fast_path.add(request)

    def remove(self, request: Request) -> None:
        """Removes a request from the running requests and from the fast path."""
        self.leave_fast_path(request)
        self._off_fast_path.remove(request)
        index = self.index(request)
        del self._requests[index], self._admission_numbers[index]

    def off_fast_path(self, begin: int) -> list[Request]:
        """The requests from index `begin` on that the next step examines, in admission order."""
        self.take_due_off_fast_path()
        requests = sorted(self._off_fast_path, key=_admission_number)
        if begin == 0:
            return requests
        return [request for request in requests if self.index(request) >= begin]

    def take_due_off_fast_path(self) -> None:
        """Removes requests from the fast path that must leave it before the next step."""
        if due := self._calendar.pop(self._clock.now, None):
            self._leave_fast_path(due)

    def leaving_fast_path(self) -> Collection[Request]:
        """The requests that leave the fast path after the next step, in any order."""
        return self._calendar.get(self._clock.now + 1, ())

    def enter_fast_path(self, requests: Mapping[Request, int]) -> None:
        """Puts each request on the fast path for the given number of steps, which is at least 1."""
        clock, now, calendar = self._clock, self._clock.now, self._calendar
        for request, num_steps in requests.items():
            request.origin -= now
            request.clock, request.is_on_fast_path = clock, True
            request.fast_path_end = end = now + num_steps
            calendar[end].add(request)
        self._off_fast_path.difference_update(requests)

    def leave_fast_path(self, request: Request) -> None:
        """Removes a request from the fast path early, if the request is on it."""
        if request.is_on_fast_path:
            leaving = self._calendar[request.fast_path_end]
            leaving.remove(request)
            if not leaving:
                del self._calendar[request.fast_path_end]
            self._leave_fast_path((request,))

    def _leave_fast_path(self, requests: Collection[Request]) -> None:
        """Separates the requests' numbers of computed tokens from the shared clock."""
        for request in requests:
            request.origin += request.clock.now
            request.clock, request.is_on_fast_path = STOPPED, False
        self._off_fast_path.update(requests)

    def advance(self, num_steps: int = 1) -> None:
        """Counts planned steps, which each compute a token of all requests on the fast path."""
        self._clock.now += num_steps

    @property
    def has_off_fast_path(self) -> bool:
        """Whether the next step examines a request that is off the fast path."""
        return bool(self._off_fast_path)

    def skip(self, num_steps: int) -> None:
        """Counts `num_steps` steps that computed a token of every request without being planned.
        Requests that should have left the fast path in these steps leave it now.
        """
        for request in self._off_fast_path:
            request.origin += num_steps
        self.advance(num_steps)
        for end in [end for end in self._calendar if end < self._clock.now]:
            self._leave_fast_path(self._calendar.pop(end))
