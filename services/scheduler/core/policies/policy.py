"""The interface of scheduling policies, which order admissions and select requests to preempt."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.common.pool.ids import RequestKey
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import StepCosts


class RequestQueue(Protocol):
    """A queue of waiting requests. Iterates over them in the order of admission."""

    def add(self, request: Request, /) -> None:
        """Queues a request that arrived."""

    def prepend(self, request: Request, /) -> None:
        """Queues a preempted request, at the head or where the policy's order puts it."""

    def reorder(self) -> None:
        """Must be called after a change of an attribute on which a request's position depends."""

    def put_in_order(self) -> None:
        """Sorts the requests by the present values of their attributes."""

    def remove(self, request: Request, /) -> None:
        """Removes a request. Raises ValueError if it is not in the queue."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The arguments of a policy's constructor."""

    config: SchedulerConfig
    clock: Callable[[], float]
    """Returns the time of a monotonic clock, in seconds."""
    step_costs: StepCosts
    """Estimates how long steps take."""
    release: Callable[[RequestKey], None] = lambda _key: None
    """Frees the blocks of a request in `Retention.held` with the next pool transaction."""


class SchedulingPolicy(Protocol):
    """The scheduling policy of one scheduler."""

    uses_priority: bool
    """Whether `Request.priority` has an effect. Otherwise priorities are refused."""

    def __init__(self, parts: PolicyParts, /) -> None: ...

    @property
    def retention(self) -> Retention | None:
        """Decides which contexts (KV blocks of ended requests) stay cached. Optional."""

    def create_request_queue(self) -> RequestQueue:
        """An empty waiting queue."""

    def victim(self, running: RunningRequests) -> Request:
        """The running request to preempt if blocks are missing. At least one request runs."""
