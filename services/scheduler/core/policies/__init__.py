"""The scheduling policies by name. A new one needs a module here and an entry in `POLICIES`."""

from services.common.errors import InvalidArgument
from services.scheduler.core.policies.fcfs import FCFSPolicy
from services.scheduler.core.policies.policy import SchedulingPolicy
from services.scheduler.core.policies.priority import PriorityPolicy

POLICIES: dict[str, SchedulingPolicy] = {"fcfs": FCFSPolicy(), "priority": PriorityPolicy()}


def find_policy(name: str) -> SchedulingPolicy:
    """The policy of this name. Raises InvalidArgument if there is none."""
    policy = POLICIES.get(name)
    if policy is None:
        raise InvalidArgument(
            f"policy must be one of {', '.join(POLICIES)}, not {name!r}", field="policy"
        )
    return policy
