"""For some scheduling policies, the orders in which requests are admitted and preempted.

The checks of tests/scheduler/invariants.py use them, and skip a policy without an entry.
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
"""For each policy, the sort key of the queue. With FCFS, preempted requests precede all others."""
VICTIM_ORDERS: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.admission_number,
    "priority": lambda request: (request.priority, request.arrival_time),
}
"""For each policy, the sort key of running requests. The last in this order is preempted first."""
