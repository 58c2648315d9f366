"""Starts further gateways for the replicas of a running gateway."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.processes import end, spawn, until_serving
from services.cli.health import until_ready
from services.cli.processes.child import ChildSpec
from services.cli.processes.ports import claim_port
from services.common.process.settings import as_text, env_prefix
from services.common.rpc.addresses import join_host_port

_HOST = "127.0.0.1"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GatewayProgram:
    """The start command of a gateway, and its addresses as host:port."""

    spec: ChildSpec
    http: str
    grpc: str

    def another(self, name: str, settings: Mapping[str, Any] | None = None) -> "GatewayProgram":
        """A gateway for the same replicas on other ports. `settings` are values of GatewaySettings
        in which it differs.

        A gateway of the same name replaces this one. A gateway of another name has its own sockets,
        but the replicas still send their spans to this gateway.
        """
        http, grpc = (
            join_host_port(_HOST, claim_port(_HOST, 0, flag))
            for flag in ("--http-port", "--grpc-port")
        )
        assert self.spec.liveness_address is not None
        sockets = f"{self.spec.liveness_address.rpartition('/')[0]}/{name}"
        health = f"{sockets}.sock"
        addresses = {"http_address": http, "address": grpc, "health_address": health}
        prefix = env_prefix("gateway")
        if name != self.spec.name and f"{prefix}TRACE_ADDRESS" in self.spec.environ:
            addresses["trace_address"] = f"{sockets}-traces.sock"
        own = {**(settings or {}), **addresses}
        environ = {f"{prefix}{setting.upper()}": as_text(value) for setting, value in own.items()}
        spec = replace(
            self.spec,
            name=name,
            environ={**self.spec.environ, **environ},
            until_ready=partial(until_ready, health),
            liveness_address=health,
        )
        return GatewayProgram(spec, http, grpc)


@asynccontextmanager
async def running(gateway: GatewayProgram, log: Path) -> AsyncIterator[None]:
    """Runs a gateway, with its output in `log`. The context is entered when the gateway serves."""
    process = spawn(gateway.spec.command, gateway.spec.environ, log)
    try:
        await until_serving(
            {gateway.spec.name: process}, lambda _: log, gateway.spec.until_ready(), _START_SECONDS
        )
        yield
    finally:
        await asyncio.to_thread(end, [process])
