"""The order of requests under the policy `program`. A program is the requests (turns) of one run of
an agent. Its context is the KV blocks that its last turn has left in the pool.
"""

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.scheduler.core.policies.programs import PROGRAM_SETTINGS
from services.scheduler.core.request import Request

RETENTION_SETTINGS = ("retention_headroom", "aging_interval", "max_warm_admissions")
_Rank = tuple[int, int, float, float, int]


class ProgramPolicy:
    """Admits requests by priority. Within a priority, requests with at least half of their context
    cached come first, then requests of the programs that are due first. The more remaining work a
    program is expected to have, the later it is due after its beginning.
    """

    uses_priority = True
    retains_contexts = True
    settings = (*PROGRAM_SETTINGS, *RETENTION_SETTINGS)

    def __init__(self, parts: PolicyParts) -> None:
        self.retention = ProgramRetention(parts)

    def create_request_queue(self) -> "ProgramQueue":
        return ProgramQueue(self)

    def victim(self, running: RunningRequests) -> Request:
        """The running request that is last by priority and by the time when its program is due."""
        return max(running, key=self._cost)

    def _cost(self, request: Request) -> tuple[int, float, float, int]:
        return request.priority, *self.retention.due(request), request.key


class ProgramQueue(list[Request]):
    """Waiting requests, which are in order only after a call of `put_in_order`."""

    def __init__(self, policy: ProgramPolicy) -> None:
        super().__init__()
        self._policy = policy
        self._sorted_at: tuple[int, int, int] | None = None

    def add(self, request: Request, /) -> None:
        self.append(request)
        self._sorted_at = None

    prepend = add

    def reorder(self) -> None:
        self._sorted_at = None

    def put_in_order(self) -> None:
        retention = self._policy.retention
        turns = retention.turns
        at = retention.version, turns.num_cold, int(turns.cold_comes_first)
        if at == self._sorted_at:
            return
        self._sorted_at = at
        ranks = dict(zip(self, map(self._rank, self), strict=True))
        cold = [request for request in self if ranks[request][1]]
        if cold and turns.oldest_comes_first:
            oldest = min(cold, key=lambda request: (request.arrival_time, request.key))
            ranks[oldest] = oldest.priority, 1, -1.0, 0.0, oldest.key
        if cold and turns.cold_comes_first:
            first = min(cold, key=ranks.__getitem__)
            ranks[first] = first.priority, -1, 0.0, 0.0, first.key
            retention.first_cold = first
        self.sort(key=ranks.__getitem__)

    def _rank(self, request: Request) -> _Rank:
        retention = self._policy.retention
        is_cold = retention.is_cold(request)
        return (request.priority, int(is_cold), *retention.due(request), request.key)
