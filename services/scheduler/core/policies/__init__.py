"""The scheduling policies by name. A new policy needs a module in this package and an entry in
`POLICIES`. A policy of another package is named `package.module:Class`.
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
"""The fields of SchedulerConfig that only some policies use."""

_MEMBERS = "uses_priority", "create_request_queue", "victim"
check_policy = one_of_or_class(POLICIES, *_MEMBERS)
"""Returns an error text if its argument names no policy, otherwise None."""


def find_policy(name: str) -> type[SchedulingPolicy]:
    """The class of the policy of this name. Raises InvalidArgument if there is none."""
    if complaint := check_policy(name):
        raise InvalidArgument(f"policy {complaint}, not {name!r}", field="policy")
    return POLICIES.get(name) or load_class(name, *_MEMBERS)


def unused_settings(name: str, given: Collection[str]) -> list[str]:
    """The settings in `given` that belong to other policies than `name`. A policy class lists its
    settings in its attribute `settings`. Raises InvalidArgument for an unknown policy.
    """
    used = getattr(find_policy(name), "settings", ())
    return [one for one in POLICY_SETTINGS if one in given and one not in used]


def retains_contexts(name: str) -> bool:
    """Whether a policy decides which contexts (KV blocks of ended requests of agents) stay cached
    (attribute `retains_contexts` of its class). Raises InvalidArgument for an unknown policy.
    """
    return bool(getattr(find_policy(name), "retains_contexts", False))


def holds_ended(name: str) -> bool:
    """Whether ended requests may keep their blocks under a policy (attribute `holds_ended` of its
    class). Raises InvalidArgument for an unknown policy.
    """
    return bool(getattr(find_policy(name), "holds_ended", False))
