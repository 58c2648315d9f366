"""The links between services on which a proxy can be placed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.cli.processes.child import ChildSpec
from services.common.process.settings import env_prefix


@dataclass(frozen=True, slots=True)
class Link:
    """A service that calls another service (the callee) of the first replica."""

    caller: str
    """The name of the calling process."""
    setting: str
    """The environment variable from which the caller reads the addresses of its callees."""
    callee: str
    """The name of the called process."""
    stream: str
    """The method whose stream is always open between caller and callee."""

    def through(self, socket: str, proxy: str) -> Callable[[ChildSpec], ChildSpec]:
        """Returns a function that makes the caller call `proxy` instead of `socket`."""

        def rewire(spec: ChildSpec) -> ChildSpec:
            if spec.name != self.caller:
                return spec
            addresses = spec.environ[self.setting].replace(socket, proxy)
            return replace(spec, environ={**spec.environ, self.setting: addresses})

        return rewire


def _variable(service: str, name: str) -> str:
    return f"{env_prefix(service)}{name}"


LINKS = {
    "gateway-scheduler": Link(
        "gateway",
        _variable("gateway", "SCHEDULERS"),
        "scheduler-0",
        "/stepwell.scheduler.v1.Scheduler/Session",
    ),
    "scheduler-kvpool": Link(
        "scheduler-0",
        _variable("scheduler", "KVPOOL"),
        "kvpool-0",
        "/stepwell.kvpool.v1.KVPool/Transact",
    ),
    "scheduler-worker": Link(
        "scheduler-0",
        _variable("scheduler", "WORKERS"),
        "worker-0",
        "/stepwell.worker.v1.Worker/Execute",
    ),
}
