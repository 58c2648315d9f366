"""The order of requests under the policies `continuum-fixed` and `continuum-ttl`. A pin is an ended
request that keeps its blocks for the next request of its program (a run of an agent).
"""

from collections.abc import Callable

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.continuum.pin_times import FixedTimes, OptimalTimes
from services.scheduler.core.policies.continuum.pins import Pins
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.programs import PROGRAM_SETTINGS
from services.scheduler.core.request import Request, RequestStatus

_Rank = tuple[bool, bool, float, int]


class FixedPolicy:
    """The policy of the code published with Continuum. Requests of programs with a pin are admitted
    first, then requests of the oldest programs. If blocks are missing, the last admitted request
    whose program has no pin is preempted.
    """

    uses_priority = False
    retains_contexts = holds_ended = True
    settings = PROGRAM_SETTINGS

    def __init__(self, parts: PolicyParts) -> None:
        self.retention = Pins(parts, FixedTimes())

    def create_request_queue(self) -> "ProgramOrder":
        return ProgramOrder(self.retention, self._rank)

    def victim(self, running: RunningRequests) -> Request:
        """The last admitted request whose program has no pin, or else the last admitted request."""
        last = next(reversed(running))
        return next(filter(self._has_no_pin, reversed(running)), last)

    def _has_no_pin(self, request: Request) -> bool:
        return not self.retention.has_pin(request)

    def _rank(self, request: Request) -> _Rank:
        pins = self.retention
        return False, not pins.has_pin(request), pins.program_arrival(request), request.key


class TTLPolicy:
    """The policy of the paper on Continuum. Preempted requests are admitted first, then requests of
    programs with a pin, then requests of the oldest programs. A pin ends when the next turn of its
    program is admitted. The program that arrived last is preempted first.
    """

    uses_priority = False
    retains_contexts = holds_ended = True
    settings = PROGRAM_SETTINGS

    def __init__(self, parts: PolicyParts) -> None:
        times = OptimalTimes(parts.step_costs, parts.config.token_budget)
        self.retention = Pins(parts, times, follows_paper=True)

    def create_request_queue(self) -> "ProgramOrder":
        return ProgramOrder(self.retention, self._rank)

    def victim(self, running: RunningRequests) -> Request:
        arrival = self.retention.program_arrival
        return max(running, key=lambda request: (arrival(request), request.key))

    def _rank(self, request: Request) -> _Rank:
        pins, is_preempted = self.retention, request.status is RequestStatus.PREEMPTED
        return (
            not is_preempted,
            not pins.has_pin(request),
            pins.program_arrival(request),
            request.key,
        )


class ProgramOrder(list[Request]):
    """Waiting requests, which are in order only after a call of `put_in_order`."""

    def __init__(self, pins: Pins, rank: Callable[[Request], _Rank]) -> None:
        super().__init__()
        self._pins = pins
        self._rank = rank
        self._sorted_at: int | None = None

    def add(self, request: Request, /) -> None:
        self.append(request)
        self._sorted_at = None

    prepend = add

    def reorder(self) -> None:
        self._sorted_at = None

    def put_in_order(self) -> None:
        if self._sorted_at != self._pins.version:
            self._sorted_at = self._pins.version
            self.sort(key=self._rank)
