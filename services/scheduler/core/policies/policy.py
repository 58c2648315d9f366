"""The port of scheduling policies, which choose the order of admission and preemption's victim."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.common.pool.ids import RequestKey
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.step_costs import StepCosts
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests. Iterates in the order of admission, from the head."""

    def add(self, request: Request, /) -> None:
        """Queues a request that arrived."""

    def prepend(self, request: Request, /) -> None:
        """Queues a preempted request, either at the head or at the position of its priority."""

    def reorder(self) -> None:
        """Must be called after an attribute has changed on which the order of the queue depends."""

    def put_in_order(self) -> None:
        """Sorts the requests by their present attributes."""

    def remove(self, request: Request, /) -> None:
        """Removes a request. Raises ValueError if it is not in the queue."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What a policy is made with."""

    config: SchedulerConfig
    clock: Callable[[], float]
    """A monotonic clock in seconds."""
    step_costs: StepCosts
    """The times of the latest steps."""
    release: Callable[[RequestKey], None] = lambda _key: None
    """Frees the blocks of a held request (`Retention.held`) with the next transaction."""


class SchedulingPolicy(Protocol):
    """The scheduling policy of one scheduler."""

    uses_priority: bool
    """Whether `Request.priority` has an effect. If not, requests with a priority are refused."""

    def __init__(self, parts: PolicyParts, /) -> None: ...

    @property
    def retention(self) -> Retention | None:
        """Decides about the contexts of ended requests. A policy without it lacks the attribute, or
        has None.
        """

    def create_request_queue(self) -> RequestQueue:
        """An empty waiting queue."""

    def victim(self, running: RunningRequests) -> Request:
        """The running request to preempt if blocks are missing. At least one request runs."""
