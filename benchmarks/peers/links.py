"""The links between services on which a proxy can stand."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.cli.processes.child import ChildSpec
from services.common.process.settings import env_prefix


@dataclass(frozen=True, slots=True)
class Link:
    """One service that calls another one, of the first replica."""

    caller: str
    """The calling process."""
    setting: str
    """Its variable that has the addresses of what it calls."""
    callee: str
    """The called process."""
    stream: str
    """The method whose stream is always open."""

    def through(self, socket: str, proxy: str) -> Callable[[ChildSpec], ChildSpec]:
        """Has the caller call `proxy` where it would call `socket`."""

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
