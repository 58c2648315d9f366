"""Scheduling and routing policies that are not part of `services`, as a user would write them."""

from collections.abc import Sequence

from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request
from tests.scheduler.shortest_prompt_first import ShortestPromptFirstPolicy

SHORTEST = "tests.scheduler.shortest_prompt_first:ShortestPromptFirstPolicy"
LAST_REPLICA = "tests.simulation.laboratory.outside:LastReplica"


class LastReplica:
    """A routing policy that chooses the replica with the greatest address."""

    def __init__(self, parts: RoutingParts) -> None:
        self.parts = parts

    def choose(self, _inflight: Inflight, candidates: Sequence[Replica]) -> RoutingDecision:
        last = max(candidates, key=lambda one: one.address)
        return RoutingDecision(last.address, RoutingReason.LEAST_LOADED, len(candidates))


class LosesRequests(ShortestPromptFirstPolicy):
    """A scheduling policy whose queue loses requests that are prepended."""

    def create_request_queue(self) -> RequestQueue:
        return _Forgetful()


class _Forgetful(list[Request]):
    add = list[Request].append

    def prepend(self, _request: Request, /) -> None:
        pass

    def reorder(self) -> None:
        pass

    put_in_order = reorder


class PreemptsNobodyThatRuns(ShortestPromptFirstPolicy):
    def victim(self, running: RunningRequests) -> Request:
        (first, *_) = running
        return Request("other", first.key, [1], 1, first.sampling)


class Random(ShortestPromptFirstPolicy):
    """A scheduling policy that preempts depending on the number of calls of `victim`."""

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts)
        self.num_asked = 0

    def victim(self, running: RunningRequests) -> Request:
        self.num_asked += 1
        return list(running)[self.num_asked % len(running)]
