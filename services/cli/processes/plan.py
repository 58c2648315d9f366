"""The processes of `stepwell up`, with each process's command, environment and time limits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.cli.health import until_ready, until_silent
from services.cli.processes.child import ChildSpec
from services.cli.processes.replica_variables import metrics_of, of_further_ranks
from services.cli.processes.run_directory import ensure_directory
from services.cli.processes.supervisor import Stage
from services.cli.settings import UpSettings, settings_of
from services.common.process.settings import as_text, env_prefix, variable_name
from services.common.rpc.addresses import join_host_port

# The gateway drains first: it rejects new requests and finishes running requests. All stages
# together stop within ten seconds, after which most supervisors would kill `stepwell up`.
_GATEWAY_DRAIN_SECONDS, _GATEWAY_STOP_SECONDS = 4.0, 6.0
_SCHEDULER_DRAIN_SECONDS, _SCHEDULER_STOP_SECONDS = 0.5, 1.5
_CACHES_DRAIN_SECONDS, _CACHES_STOP_SECONDS = 0.5, 1.5
_GATEWAY_LINGER_SECONDS = _SCHEDULER_STOP_SECONDS + _CACHES_STOP_SECONDS + 1
"""Seconds for which a stopping gateway that keeps traces still accepts other services' spans."""

_VIEWER = (".viewer", "services.gateway.options")
"""The gateway's option that keeps traces. A gateway without the option rejects the option's
settings. `find_spec` finds the option without importing the gateway, which takes a second.
"""
_RESUBMIT = env_prefix("gateway") + "RESUBMIT_TIMEOUT_SECONDS"
_LOOPBACK = "127.0.0.1"

# Time for which OpenTelemetry's SDK collects spans before it exports them. The SDK's default is
# five seconds.
_EXPORT_DELAY, _EXPORT_DELAY_MILLISECONDS = "OTEL_BSP_SCHEDULE_DELAY", "500"

_RESTART_SECONDS = 600.0
"""Limit on the gateway's wait for a replica, whose services may take minutes to restart."""
_GATEWAY_PATIENCE = 5
"""The gateway's liveness timeout is multiplied by this factor, because a kill of the gateway breaks
its clients' streams.
"""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the services. The gateway listens on two ports, the other services on Unix
    sockets in `run_directory`. The gateway also has a socket there, for health checks.
    """

    host: str
    http_port: int
    grpc_port: int
    run_directory: Path
    master_ports: tuple[int, ...] = ()
    """For each replica, the port at which the ranks of its model connect to each other. Empty if
    each replica has one worker.
    """
    vllm_grpc_ports: tuple[int, ...] = ()
    """For each replica, the port where its scheduler serves vllm.grpc.engine. May be empty."""
    admin_port: int | None = None
    """The loopback port of operator calls. None if operator calls are not served."""

    def socket(self, service: str) -> str:
        return f"unix:{self.run_directory / service}.sock"

    @property
    def http(self) -> str:
        """The address of the HTTP API for clients on this machine, host:port."""
        return join_host_port(_reachable(self.host), self.http_port)

    @property
    def admin(self) -> str | None:
        """The address of operator calls, host:port. None if operator calls are not served."""
        return None if self.admin_port is None else join_host_port(_LOOPBACK, self.admin_port)

    @property
    def grpc(self) -> str:
        """The address of the gRPC API for clients on this machine, host:port."""
        return join_host_port(_reachable(self.host), self.grpc_port)


def stages(settings: UpSettings, addresses: Addresses, environ: Mapping[str, str]) -> list[Stage]:
    """The services as stages, in the order in which they stop."""
    replicas = tuple(_Replica.named(index, settings) for index in range(settings.replicas))
    wiring, specs = _Wiring(settings, addresses, environ), _Specs(settings, addresses, environ)
    specs_of_further_ranks = _Specs(settings, addresses, of_further_ranks(environ))
    gateway = specs.of("gateway", "gateway", wiring.gateway(replicas))
    schedulers, caches = [], []
    for replica in replicas:
        schedulers.append(specs.of("scheduler", replica.scheduler, wiring.scheduler(replica)))
        caches.append(specs.of("kvpool", replica.kvpool, wiring.kvpool(replica)))
        for rank, worker in enumerate(replica.workers):
            of = specs_of_further_ranks.of if rank else specs.of
            caches.append(of("worker", worker, wiring.worker(replica, rank), replica.worker_team))
    return [
        Stage((gateway,), _GATEWAY_STOP_SECONDS),
        Stage(tuple(schedulers), _SCHEDULER_STOP_SECONDS),
        Stage(tuple(caches), _CACHES_STOP_SECONDS),
    ]


class _Specs:
    """Builds the child processes. Forwards the settings of `stepwell up` that each process has."""

    def __init__(
        self, settings: UpSettings, addresses: Addresses, environ: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._addresses = addresses
        self._environ = environ
        self._keeps_traces = settings.trace_sample_ratio != 0 and find_spec(*_VIEWER) is not None
        if self._keeps_traces:
            self._environ = {_EXPORT_DELAY: _EXPORT_DELAY_MILLISECONDS, **environ}

    def of(
        self, service: str, name: str, wiring: Mapping[str, Any], team: str | None = None
    ) -> ChildSpec:
        """The process `name` of a service. `wiring` overrides the settings of `stepwell up`."""
        settings, address = self._settings, self._addresses.socket(name)
        passed = {setting: getattr(settings, setting) for setting in settings_of(service)}
        given = {setting: value for setting, value in passed.items() if value is not None}
        if self._keeps_traces:
            given |= _kept_traces(service, given, self._addresses, self._environ)
        lingers = self._keeps_traces and service == "gateway"
        return ChildSpec(
            name=name,
            command=(sys.executable, "-m", f"services.{service}"),
            environ=_with_settings(self._environ, service, {**given, **wiring}),
            until_ready=partial(until_ready, address),
            team=team,
            liveness_address=address,
            silence_seconds=settings.liveness_timeout_seconds
            * (_GATEWAY_PATIENCE if service == "gateway" else 1),
            niceness=settings.worker_niceness if service == "worker" else 0,
            prepare=partial(ensure_directory, self._addresses.run_directory),
            until_drained=partial(until_silent, address) if lingers else None,
        )


@dataclass(frozen=True, slots=True)
class _Wiring:
    """Settings of each service that `stepwell up` determines: addresses and drain times."""

    settings: UpSettings
    addresses: Addresses
    environ: Mapping[str, str]

    def gateway(self, replicas: "tuple[_Replica, ...]") -> dict[str, Any]:
        settings, addresses = self.settings, self.addresses
        return {
            "model": settings.model,
            "http_address": join_host_port(addresses.host, addresses.http_port),
            "address": join_host_port(addresses.host, addresses.grpc_port),
            "health_address": addresses.socket("gateway"),
            "schedulers": tuple(addresses.socket(replica.scheduler) for replica in replicas),
            "drain_seconds": _GATEWAY_DRAIN_SECONDS,
            **({} if _RESUBMIT in self.environ else {"resubmit_timeout_seconds": _RESTART_SECONDS}),
            **({} if addresses.admin is None else {"admin_address": addresses.admin}),
        }

    def scheduler(self, replica: "_Replica") -> dict[str, Any]:
        addresses, index = self.addresses, replica.index
        return {
            "address": addresses.socket(replica.scheduler),
            "kvpool": addresses.socket(replica.kvpool),
            "workers": tuple(addresses.socket(worker) for worker in replica.workers),
            "drain_seconds": _SCHEDULER_DRAIN_SECONDS,
            **_vllm_grpc(index, self.settings, addresses),
            **({"replica": f"replica-{index}"} if self.settings.replicas > 1 else {}),
            **metrics_of("scheduler", index, self.environ),
        }

    def kvpool(self, replica: "_Replica") -> dict[str, Any]:
        return {
            "address": self.addresses.socket(replica.kvpool),
            "drain_seconds": _CACHES_DRAIN_SECONDS,
            **metrics_of("kvpool", replica.index, self.environ),
        }

    def worker(self, replica: "_Replica", rank: int) -> dict[str, Any]:
        settings, addresses = self.settings, self.addresses
        return {
            "model": settings.model,
            "address": addresses.socket(replica.workers[rank]),
            "drain_seconds": _CACHES_DRAIN_SECONDS,
            **_membership(rank, replica.index, settings, addresses),
            **_sharing(replica.index, settings),
        }


def _kept_traces(
    service: str, given: Mapping[str, Any], addresses: Addresses, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Settings for exporting spans to the gateway, and to the collector if one is configured. If
    neither a collector nor sampling ratios are configured, only the gateway decides which traces
    are sampled, and the scheduler traces all steps of traced requests.
    """
    if service == "gateway":
        by_ratio = given.get("trace_sample_ratio") is not None
        return {
            "trace_address": addresses.socket("traces"),
            "trace_linger_seconds": _GATEWAY_LINGER_SECONDS,
            **({"trace_store_max_per_minute": 0} if by_ratio else {}),
        }
    prefix = env_prefix(service)
    collector = given.get("otlp_endpoint") or environ.get(f"{prefix}OTLP_ENDPOINT")
    to_gateway = addresses.socket("traces")
    if collector:
        return {"otlp_endpoint": f"{collector},{to_gateway}"}
    alone = {"trace_sample_ratio": 0.0}
    if service == "scheduler":
        alone["trace_step_sample_ratio"] = 1.0
    ratios = {
        name: ratio
        for name, ratio in alone.items()
        if name not in given and prefix + name.upper() not in environ
    }
    return {"otlp_endpoint": to_gateway, **ratios}


@dataclass(frozen=True, slots=True)
class _Replica:
    """Names of one replica's services. The workers of a replica form one team."""

    index: int
    scheduler: str
    kvpool: str
    workers: tuple[str, ...]
    worker_team: str

    @classmethod
    def named(cls, index: int, settings: UpSettings) -> "_Replica":
        """Creates the names. They include the replica's index if there are several replicas, and
        the rank if there are several ranks.
        """
        suffix = f"-{index}" if settings.replicas > 1 else ""
        size = settings.num_ranks
        team = f"worker{suffix}"
        workers = (team,) if size == 1 else tuple(f"{team}-{rank}" for rank in range(size))
        return cls(index, f"scheduler{suffix}", f"kvpool{suffix}", workers, team)


def _membership(
    rank: int, replica: int, settings: UpSettings, addresses: Addresses
) -> dict[str, Any]:
    """Settings of a worker's rank in its group. The group sizes of a single worker are set to 1, to
    override WORLD_SIZE and RANK in the environment of the command.
    """
    sizes = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
    }
    if settings.num_ranks == 1:
        return sizes
    return {
        **sizes,
        "rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": addresses.master_ports[replica],
    }


def _sharing(replica: int, settings: UpSettings) -> dict[str, int]:
    """Settings that inform a worker about the replicas with which it shares this machine."""
    if settings.replicas == 1:
        return {}
    return {"num_local_replicas": settings.replicas, "local_replica": replica}


def _vllm_grpc(replica: int, settings: UpSettings, addresses: Addresses) -> dict[str, Any]:
    """The settings of a scheduler that serves vllm.grpc.engine: address and reported model."""
    if not addresses.vllm_grpc_ports:
        return {}
    return {
        "vllm_grpc_address": join_host_port(addresses.host, addresses.vllm_grpc_ports[replica]),
        "model": settings.model,
    }


def _reachable(host: str) -> str:
    """The host at which clients on this machine reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _with_settings(
    environ: Mapping[str, str], service: str, values: Mapping[str, Any]
) -> dict[str, str]:
    """The environment plus one variable for each setting, and without the setting's _FILE variable.
    Settings are not passed as flags, since other users of the machine can read flags.
    """
    own = {variable_name(service, name): as_text(value) for name, value in values.items()}
    files = {f"{name}_FILE" for name in own}
    return {name: text for name, text in environ.items() if name not in files} | own
