"""What `stepwell up` starts: each service's command, environment, readiness and time to stop."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.cli.child import ChildSpec
from services.cli.health import until_ready
from services.cli.run_directory import ensure_directory
from services.cli.settings import UpSettings, settings_of
from services.cli.supervisor import Stage
from services.common.addresses import join_host_port
from services.common.settings import as_text, env_prefix

# The gateway drains first: it refuses new requests and lets running ones end. Together the stages
# stay below ten seconds, after which most supervisors kill.
_GATEWAY_DRAIN_SECONDS, _GATEWAY_STOP_SECONDS = 4.0, 6.0
_SCHEDULER_DRAIN_SECONDS, _SCHEDULER_STOP_SECONDS = 0.5, 1.5
_CACHES_DRAIN_SECONDS, _CACHES_STOP_SECONDS = 0.5, 1.5

# Clients' streams end with the gateway, and go on after the end of any other service.
_GATEWAY_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services listen: the gateway on two ports, the others on sockets in a directory.

    `master_port`: where the ranks of a divided model find each other; None without ranks.
    `vllm_grpc_port`: where the scheduler serves vllm.grpc.engine; None where it does not.
    """

    host: str
    http_port: int
    grpc_port: int
    run_directory: Path
    master_port: int | None = None
    vllm_grpc_port: int | None = None

    def socket(self, service: str) -> str:
        """The internal address of a service."""
        return f"unix:{self.run_directory / service}.sock"

    @property
    def http(self) -> str:
        """Where to reach the HTTP API from this machine, host:port."""
        return join_host_port(_reachable(self.host), self.http_port)

    @property
    def grpc(self) -> str:
        """Where to reach the gRPC API from this machine, host:port."""
        return join_host_port(_reachable(self.host), self.grpc_port)


def stages(settings: UpSettings, addresses: Addresses, environ: Mapping[str, str]) -> list[Stage]:
    """The services, in the order in which they stop."""
    workers = worker_names(settings.tensor_parallel_size)
    redis = {} if settings.redis is None else {"redis_url": settings.redis}
    wiring: dict[str, dict[str, Any]] = {
        "gateway": {
            "model": settings.model,
            "http_address": join_host_port(addresses.host, addresses.http_port),
            "address": join_host_port(addresses.host, addresses.grpc_port),
            "schedulers": (addresses.socket("scheduler"),),
            "drain_seconds": _GATEWAY_DRAIN_SECONDS,
            **redis,
        },
        "scheduler": {
            "address": addresses.socket("scheduler"),
            "kvpool": addresses.socket("kvpool"),
            "workers": tuple(addresses.socket(worker) for worker in workers),
            "drain_seconds": _SCHEDULER_DRAIN_SECONDS,
            **_vllm_grpc(settings, addresses),
        },
        "kvpool": {
            "address": addresses.socket("kvpool"),
            "drain_seconds": _CACHES_DRAIN_SECONDS,
            **redis,
        },
        **{
            worker: {
                "model": settings.model,
                "address": addresses.socket(worker),
                "drain_seconds": _CACHES_DRAIN_SECONDS,
                **_membership(rank, settings.tensor_parallel_size, addresses),
            }
            for rank, worker in enumerate(workers)
        },
    }

    def spec(service: str, address: str, name: str | None = None) -> ChildSpec:
        name = name or service
        passed = {setting: getattr(settings, setting) for setting in settings_of(service)}
        given = {setting: value for setting, value in passed.items() if value is not None}
        return ChildSpec(
            name=name,
            command=(sys.executable, "-m", f"services.{service}"),
            environ={**environ, **_as_environment(service, given | wiring[name])},
            until_ready=partial(until_ready, address),
            team=service,
            liveness_address=address,
            silence_seconds=settings.liveness_timeout_seconds
            * (_GATEWAY_PATIENCE if service == "gateway" else 1),
            prepare=partial(ensure_directory, addresses.run_directory),
        )

    return [
        Stage((spec("gateway", addresses.grpc),), _GATEWAY_STOP_SECONDS),
        Stage((spec("scheduler", addresses.socket("scheduler")),), _SCHEDULER_STOP_SECONDS),
        Stage(
            (
                spec("kvpool", addresses.socket("kvpool")),
                *(spec("worker", addresses.socket(worker), worker) for worker in workers),
            ),
            _CACHES_STOP_SECONDS,
        ),
    ]


def worker_names(tensor_parallel_size: int) -> tuple[str, ...]:
    """The names of the workers, with their ranks if there are several."""
    if tensor_parallel_size == 1:
        return ("worker",)
    return tuple(f"worker-{rank}" for rank in range(tensor_parallel_size))


def _membership(rank: int, size: int, addresses: Addresses) -> dict[str, Any]:
    """A worker's rank in its group; a single worker gets the size 1, so that WORLD_SIZE and RANK in
    the environment of the command do not apply.
    """
    if size == 1:
        return {"tensor_parallel_size": 1}
    return {
        "tensor_parallel_size": size,
        "rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": addresses.master_port,
    }


def _vllm_grpc(settings: UpSettings, addresses: Addresses) -> dict[str, Any]:
    """Where a scheduler serves vllm.grpc.engine, and the model that it passes on."""
    if addresses.vllm_grpc_port is None:
        return {}
    return {
        "vllm_grpc_address": join_host_port(addresses.host, addresses.vllm_grpc_port),
        "model": settings.model,
    }


def _reachable(host: str) -> str:
    """The host by which clients of this machine reach a server on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _as_environment(service: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as variables: other users of the machine can read flags, and API keys are secret."""
    return {env_prefix(service) + name.upper(): as_text(value) for name, value in values.items()}
