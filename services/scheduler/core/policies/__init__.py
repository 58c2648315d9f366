"""The scheduling policies by name. A new one needs a module here and an entry in `POLICIES`. A
policy of another package is named `package.module:Class`.
"""

from collections.abc import Collection

from services.common.errors import InvalidArgument
from services.common.process.outside_class import load_class, one_of_or_class
from services.scheduler.core.policies.continuum import FixedPolicy, TTLPolicy
from services.scheduler.core.policies.fcfs import FCFSPolicy
from services.scheduler.core.policies.policy import SchedulingPolicy
from services.scheduler.core.policies.priority import PriorityPolicy
from services.scheduler.core.policies.program import RETENTION_SETTINGS, ProgramPolicy
from services.scheduler.core.policies.programs import PROGRAM_SETTINGS

PROGRAM = "program"
POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    PROGRAM: ProgramPolicy,
    "continuum-fixed": FixedPolicy,
    "continuum-ttl": TTLPolicy,
}

POLICY_SETTINGS = (*PROGRAM_SETTINGS, *RETENTION_SETTINGS)
"""The fields of SchedulerConfig that not all policies use."""

_MEMBERS = "uses_priority", "create_request_queue", "victim"
check_policy = one_of_or_class(POLICIES, *_MEMBERS)
"""The check of a setting."""


def find_policy(name: str) -> type[SchedulingPolicy]:
    """The class of this name. Raises InvalidArgument if there is none."""
    if complaint := check_policy(name):
        raise InvalidArgument(f"policy {complaint}, not {name!r}", field="policy")
    return POLICIES.get(name) or load_class(name, *_MEMBERS)


def unused_settings(name: str, given: Collection[str]) -> list[str]:
    """Those of the settings of policies that a policy does not use, as its attribute `settings`
    says. Raises InvalidArgument if there is no policy of this name.
    """
    used = getattr(find_policy(name), "settings", ())
    return [one for one in POLICY_SETTINGS if one in given and one not in used]


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
