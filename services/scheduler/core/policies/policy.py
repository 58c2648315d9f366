"""What a scheduling policy decides: the order of admission, and the victim of a preemption."""

from typing import Protocol

from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.running_requests import RunningRequests


class SchedulingPolicy(Protocol):
    """One policy. Has no state: what it orders is in the queue that it creates."""

    uses_priority: bool
    """Whether it heeds `Request.priority`. If not, requests that have a priority are refused."""

    def create_request_queue(self) -> RequestQueue:
        """An empty waiting queue, which iterates in the order of admission."""

    def victim(self, running: RunningRequests) -> Request:
        """The running request to preempt where blocks are missing. At least one request runs."""
