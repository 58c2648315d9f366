"""Trials that break the containers of one role, or of a whole replica."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from services.cli.deploy.ports import Container, Deployment, Fault, Unhealthy
from services.cli.errors import CommandError

REPLICA = "replica"
"""The name of the role that all containers of a replica have together."""
_DRAIN_ORDER = ("scheduler", "kvpool", "worker")
"""A scheduler that drains needs its pool and its worker. They are started in reverse order."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds. A fault that does not end by itself is undone after `hold_seconds`. A
    killed container must be started again within `heal_seconds`.
    """

    hold_seconds: float
    heal_seconds: float


class Break:
    """Breaks a container of a role, or all containers of a replica. If the role belongs to
    replicas, the replica with the most running requests is chosen.
    """

    def __init__(self, deployment: Deployment, fault: Fault, role: str, times: Times) -> None:
        self._deployment, self._fault, self._role, self._times = deployment, fault, role, times
        self.name = f"{fault.value} {role}"
        self.breaks_streams = role == "gateway"

    def __call__(self, running: Mapping[str, int], settle: Callable[[], object]) -> Sequence[str]:  # noqa: ARG002
        victims = _victims(self._deployment.containers(), self._role, running)
        with ExitStack() as undo:
            for victim in victims:
                undo.enter_context(self._deployment.broken(victim, self._fault))
            if self._fault is not Fault.KILL:
                time.sleep(self._times.hold_seconds)
        if self._fault is Fault.KILL:
            self._wait_for_restarts(victims)
        return [victim.name for victim in victims]

    def _wait_for_restarts(self, victims: Sequence[Container]) -> None:
        deadline = time.monotonic() + self._times.heal_seconds
        before = {(victim.id, victim.started_at) for victim in victims}
        while old := [
            one.name for one in self._deployment.containers() if (one.id, one.started_at) in before
        ]:
            if time.monotonic() > deadline:
                raise Unhealthy(
                    f"after {self._times.heal_seconds:.0f} s {old[0]} was not started again"
                )
            time.sleep(_POLL_SECONDS)


def _victims(
    containers: Sequence[Container], role: str, running: Mapping[str, int]
) -> Sequence[Container]:
    busiest = max(running, key=lambda host: running[host], default="")
    replicas = {one.replica for one in containers if busiest in one.hosts and one.replica}
    if role == REPLICA:
        of_replica = [one for one in containers if one.role in _DRAIN_ORDER]
        victims = [one for one in of_replica if one.replica in replicas] or of_replica
        return sorted(victims, key=lambda one: _DRAIN_ORDER.index(one.role))
    candidates = [container for container in containers if container.role == role]
    if not candidates:
        raise CommandError(f"the deployment has no {role}", exit_status=2)
    return [next((one for one in candidates if one.replica in replicas), candidates[0])]
