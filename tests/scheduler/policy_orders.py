"""For each policy, the orders of queue and victims that the checks of each step expect.

For a policy without an entry, all other checks apply.
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
"""The queue's order. With FCFS, preempted requests are first, and the others follow in the order of
arrival.
"""
VICTIM_ORDERS: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.admission_number,
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""The order of running requests. The last one is preempted first."""
