"""Trials that change a deployment by the commands of docs/deploying.md."""

import time
from collections.abc import Callable, Mapping, Sequence

from services.cli.deploy.ports import Container, Deployment, Fleet, Operator, Unhealthy
from services.cli.errors import CommandError

_POLL_SECONDS = 0.25


class Upgrade:
    """Replaces the images of all services: one replica, the gateways one by one, and the other
    replicas. In this order a gateway always has a replica of its protocol.
    """

    breaks_streams = False

    def __init__(
        self, deployment: Deployment, operator: Operator, tag: str, name: str = "upgrade"
    ) -> None:
        """Raises CommandError without two gateways behind a proxy."""
        self._deployment, self._operator, self._tag = deployment, operator, tag
        self.name = f"{name} to {tag}"
        roles = [container.role for container in deployment.containers()]
        if roles.count("gateway") < 2 or "proxy" not in roles:
            raise CommandError(
                "an upgrade needs two gateways behind a proxy: add two-gateways.yaml", exit_status=2
            )

    def __call__(self, running: Mapping[str, int], settle: Callable[[], object]) -> Sequence[str]:  # noqa: ARG002
        containers = self._deployment.containers()
        gateways = [one.name for one in containers if one.role == "gateway"]
        replicas = _replicas(containers)
        first, *others = sorted(replicas, reverse=True)
        self._replace_replica(replicas[first])
        settle()
        for name in reversed(gateways):
            self._operator.replace([name], self._tag)
            settle()
        for other in others:
            self._replace_replica(replicas[other])
            settle()
        names = [*gateways, *(one.name for parts in replicas.values() for one in parts)]
        for container in self._deployment.containers():
            if container.name in names and container.tag != self._tag:
                raise Unhealthy(f"{container.name} has the tag {container.tag}")
        return names

    def _replace_replica(self, parts: Sequence[Container]) -> None:
        for scheduler in [one.name for one in parts if one.role == "scheduler"]:
            self._operator.stop(scheduler)
        self._operator.replace([one.name for one in parts], self._tag)


class Rotation:
    """Replaces the clients' API key while streams run, and revokes the old one."""

    name = "rotate API key"
    breaks_streams = False

    def __init__(
        self, deployment: Deployment, operator: Operator, fleet: Fleet, seconds: float
    ) -> None:
        """Gateways must refuse the revoked key within `seconds`."""
        self._deployment, self._operator, self._fleet = deployment, operator, fleet
        self._seconds = seconds

    def __call__(self, running: Mapping[str, int], settle: Callable[[], object]) -> Sequence[str]:  # noqa: ARG002
        gateways = [one.name for one in self._deployment.containers() if one.role == "gateway"]
        old, new = self._fleet.api_key or "", self._operator.create_key()
        for gateway in gateways:
            if not self._operator.is_accepted(new, gateway):
                raise Unhealthy(f"{gateway} does not accept the new key")
        self._fleet.api_key = new
        self._operator.revoke_key(old)
        deadline = time.monotonic() + self._seconds
        for gateway in gateways:
            while self._operator.is_accepted(old, gateway):
                if time.monotonic() > deadline:
                    raise Unhealthy(
                        f"after {self._seconds:.0f} s {gateway} still accepts the revoked key"
                    )
                time.sleep(_POLL_SECONDS)
        return gateways


def _replicas(containers: Sequence[Container]) -> dict[str, list[Container]]:
    replicas: dict[str, list[Container]] = {}
    for container in containers:
        if container.replica:
            replicas.setdefault(container.replica, []).append(container)
    return replicas
