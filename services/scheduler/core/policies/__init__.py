"""The scheduling policies by name. A new one needs a module here and an entry in `POLICIES`. A
policy of another package is named `package.module:Class`.
"""

from services.common.errors import InvalidArgument
from services.common.process.outside_class import load_class, one_of_or_class
from services.scheduler.core.policies.continuum import FixedPolicy, TTLPolicy
from services.scheduler.core.policies.fcfs import FCFSPolicy
from services.scheduler.core.policies.policy import SchedulingPolicy
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.policies.program import ProgramPolicy

PROGRAM = "program"
POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    PROGRAM: ProgramPolicy,
    "continuum-fixed": FixedPolicy,
    "continuum-ttl": TTLPolicy,
}

_MEMBERS = "uses_priority", "create_request_queue", "victim"
check_policy = one_of_or_class(POLICIES, *_MEMBERS)
"""The check of a setting."""


def find_policy(name: str) -> type[SchedulingPolicy]:
    """The class of this name. Raises InvalidArgument if there is none."""
    if complaint := check_policy(name):
        raise InvalidArgument(f"policy {complaint}, not {name!r}", field="policy")
    return POLICIES.get(name) or load_class(name, *_MEMBERS)


def retains_contexts(name: str) -> bool:
    """Whether a policy decides about contexts of ended requests, as its attribute
    `retains_contexts` says. Raises InvalidArgument if there is no policy of this name.
    """
    return bool(getattr(find_policy(name), "retains_contexts", False))


def holds_ended(name: str) -> bool:
    """Whether a policy lets requests that have ended keep their blocks, as its attribute
    `holds_ended` says. Raises InvalidArgument if there is no policy of this name.
    """
    return bool(getattr(find_policy(name), "holds_ended", False))
