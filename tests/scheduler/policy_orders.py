"""For some policies, the orders in which requests are admitted and preempted.

tests/scheduler/invariants.py checks them. Without an entry for a policy, the order is not checked.
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
"""Sort keys of the queue. With FCFS, preempted requests come before all others."""
VICTIM_ORDERS: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.admission_number,
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""Sort keys of the running requests. The last request in this order is preempted first."""
