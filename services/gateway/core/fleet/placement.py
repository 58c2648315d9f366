"""Chooses a ready replica for a sequence (the prompt and one answer of a request), by the routing
policy. Replicas whose queues have room are preferred.
"""

from collections.abc import Sequence
from typing import cast

from services.common.errors import ResourceExhausted
from services.gateway.core.fleet.admission import Admission
from services.gateway.core.fleet.membership import Membership
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingPolicy
from services.gateway.core.ports import Clock
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.timeline import Part


class Placement:
    """Chooses among the replicas of a membership, and does not send anything."""

    def __init__(self, membership: Membership, policy: RoutingPolicy, clock: Clock) -> None:
        self._membership = membership
        self._policy = policy
        self._clock = clock
        self._knows_queues = False
        """Whether any replica has announced the state of its queue."""

    def reported(self, replica: Replica) -> None:
        self._knows_queues |= replica.queue is not None

    def check_queues(self, deadline: float | None, num_arriving: int) -> None:
        """Raises ResourceExhausted if the queues of all ready replicas would refuse another
        request. The `num_arriving` requests that the gateway still prepares are assumed to be
        queued before this request.
        """
        timeout, ready = self._timeout(deadline), self._membership.ready()
        share = num_arriving / max(1, len(ready))
        refusals = [replica.queue_refusal(timeout, num_arriving=share) for replica in ready]
        if refusals and None not in refusals:
            try:
                raise cast(ResourceExhausted, refusals[0])
            finally:
                # The traceback refers to this frame, and the frame to the error, which would form a
                # reference cycle.
                refusals.clear()

    def place(
        self, inflight: Inflight, admission: Admission
    ) -> tuple[Replica, RoutingDecision] | None:
        """Returns a ready replica that has not refused the sequence, and the routing decision, or
        None if there is no such replica. `admission` may exclude replicas.
        """
        ready = self._membership.ready()
        if refused_by := inflight.refused_by:
            ready = [replica for replica in ready if replica.address not in refused_by]
        if not ready:
            return None
        inflight.trace.timeline.enter(Part.ROUTE)
        with_room = self._with_room(inflight, ready) if self._knows_queues else ready
        some_have_room = 0 < len(with_room) < len(ready)
        candidates = admission.candidates(inflight, with_room if some_have_room else ready)
        if len(candidates) == 1:
            (replica,) = candidates
            return replica, RoutingDecision(replica.address, RoutingReason.ONLY, 1)
        route = self._policy.choose(inflight, candidates)
        return self._membership.at(route.address), route

    def _with_room(self, inflight: Inflight, ready: Sequence[Replica]) -> list[Replica]:
        timeout = self._timeout(inflight.request.deadline)
        has_output = bool(inflight.output_token_ids)
        return [
            replica
            for replica in ready
            if replica.queue is None
            or replica.queue_refusal(timeout, has_output=has_output) is None
        ]

    def _timeout(self, deadline: float | None) -> float | None:
        return None if deadline is None else deadline - self._clock.time()
