"""Who runs, and who of them a step must look at."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from operator import attrgetter

from services.scheduler.core.request import STANDING, Clock, Request

_turn = attrgetter("turn")


class RunningRequests:
    """The requests that run, in the order of their admission.

    Most of them decode in stride: every step computes one more token of them and has nothing else
    to do. Those sleep. Their count of computed tokens follows a clock that ticks with each step,
    and a calendar says when something else is next due, so that a step looks only at who is awake:
    it costs what happens, not what runs. Such a calendar is a timing wheel (Varghese and Lauck,
    1987).
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self._requests: list[Request] = []
        self._turns: list[int] = []
        self._next_turn = count()
        self._awake: set[Request] = set()
        self._calendar: defaultdict[int, set[Request]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def between(self, begin: int, end: int) -> Sequence[Request]:
        """Those from place `begin` up to place `end`."""
        return self._requests[begin:end]

    def place(self, request: Request) -> int:
        """Where in the order a request stands."""
        return bisect_left(self._turns, request.turn)

    def append(self, request: Request) -> None:
        """Lets a request run, behind the others, and awake."""
        request.turn = next(self._next_turn)
        self._requests.append(request)
        self._turns.append(request.turn)
        self._awake.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, awake."""
        self.rouse(request)
        self._awake.remove(request)
        place = self.place(request)
        del self._requests[place], self._turns[place]

    def awake(self, begin: int) -> list[Request]:
        """Who is awake in the step to come, in order, from place `begin` on."""
        if due := self._calendar.pop(self.clock.now, None):
            for request in due:
                request.origin += self.clock.now
                request.clock = STANDING
            self._awake |= due
        awake = sorted(self._awake, key=_turn)
        if begin == 0:
            return awake
        return [request for request in awake if self.place(request) >= begin]

    def waking(self) -> Collection[Request]:
        """Who sleeps through the step to come and wakes after it, in no order."""
        return self._calendar.get(self.clock.now + 1, ())

    def sleep(self, request: Request, num_steps: int) -> None:
        """Lets a request decode in stride for so many steps, one or more."""
        now = self.clock.now
        request.clock = self.clock
        request.origin -= now
        request.wakes_at = wakes_at = now + num_steps
        self._awake.remove(request)
        self._calendar[wakes_at].add(request)

    def rouse(self, request: Request) -> None:
        """Wakes a request early, if it sleeps: the step that is planned may pass it over."""
        if request.clock is not STANDING:
            sleepers = self._calendar[request.wakes_at]
            sleepers.remove(request)
            if not sleepers:
                del self._calendar[request.wakes_at]
            request.origin += self.clock.now
            request.clock = STANDING
            self._awake.add(request)
