"""By policy, the orders of queue and victims that the checks of each step expect.

A policy without an entry is held to everything else.
"""

from collections.abc import Callable
from typing import Any

from services.scheduler.core.request import Request

ADMISSION_ORDERS: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: (
        request.num_preemptions == 0,
        request.arrival_time if request.num_preemptions == 0 else 0,
    ),
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""The order of the queue: with FCFS preempted requests, then the others by arrival."""
VICTIM_ORDERS: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.admission_number,
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""The order of running requests in which the last is preempted first."""
