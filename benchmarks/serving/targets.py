"""The targets of a load: the services through each API, and all code in one process."""

import os
from typing import Protocol

from benchmarks.common.clients import GrpcClient, HttpClient
from benchmarks.common.load import Load, RequestTimes, run_load
from benchmarks.common.process_usage import CLIENT
from benchmarks.serving.in_process_child import InProcessChild


class Target(Protocol):
    """Runs loads in one process, or on the services through one of their APIs."""

    def pids(self) -> dict[str, int]:
        """Maps names of the target's processes to process ids."""
        ...

    async def run(self, load: Load) -> list[RequestTimes]:
        """Runs a load to its end."""
        ...


class Services(Protocol):
    """Running services: their addresses and processes."""

    @property
    def http(self) -> str:
        """host:port of the HTTP API."""
        ...

    @property
    def grpc(self) -> str:
        """host:port of the gRPC API."""
        ...

    def pids(self) -> dict[str, int]:
        """The process id of each service."""
        ...


class InProcessTarget:
    """One process that runs the code of all services and the clients."""

    def __init__(self, child: InProcessChild) -> None:
        self._child = child

    def pids(self) -> dict[str, int]:
        return {"one process": self._child.pid}

    async def run(self, load: Load) -> list[RequestTimes]:
        return await self._child.run(load)


class GrpcTarget:
    """The services, through the gateway's gRPC API."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def pids(self) -> dict[str, int]:
        return {**self._services.pids(), CLIENT: os.getpid()}

    async def run(self, load: Load) -> list[RequestTimes]:
        client = GrpcClient(self._services.grpc)
        try:
            return await run_load(client, load)
        finally:
            await client.close()


class HttpTarget(GrpcTarget):
    """The services, through the gateway's HTTP API, as server-sent events."""

    async def run(self, load: Load) -> list[RequestTimes]:
        client = HttpClient(self._services.http)
        try:
            await client.open(load.concurrency)
            return await run_load(client, load)
        finally:
            await client.close()
