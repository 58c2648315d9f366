"""Makes the links (connections) to all known schedulers. For each link a task keeps a session, a
gRPC stream, open.
"""

import asyncio

from services.common.telemetry.trace_headers import TraceHeaders
from services.common.tls.credentials import Tls
from services.gateway.adapters.schedulers.scheduler_link import SchedulerLink
from services.gateway.core.fleet.replica import Replica


class SchedulerLinks:
    """Implements the core's Links over gRPC. Sessions are opened while `run` is running."""

    def __init__(
        self, gateway_id: str, session_timeout_seconds: float, tls: Tls | None = None
    ) -> None:
        self._gateway_id = gateway_id
        self._session_timeout = session_timeout_seconds
        self._tls = tls
        self._links: dict[str, SchedulerLink] = {}
        self._tasks: dict[SchedulerLink, asyncio.Task[None]] = {}
        self._to_open: asyncio.Queue[tuple[SchedulerLink, Replica]] = asyncio.Queue()

    def __getitem__(self, address: str) -> SchedulerLink:
        return self._links[address]

    def all(self) -> list[SchedulerLink]:
        return list(self._links.values())

    def keep_trace(self, address: str, request_id: str, trace: TraceHeaders) -> None:
        """Asks a scheduler to export a sequence's spans. Does nothing for an unknown scheduler."""
        link = self._links.get(address)
        if link is not None:
            link.keep_trace(request_id, trace)

    def make(self, address: str) -> SchedulerLink:
        link = SchedulerLink(address, self._gateway_id, self._session_timeout, self._tls)
        self._links[address] = link
        return link

    def open(self, replica: Replica) -> None:
        self._to_open.put_nowait((self._links[replica.address], replica))

    def close(self, replica: Replica) -> None:
        task = self._tasks.pop(self._links.pop(replica.address), None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        """Keeps the sessions open until cancelled. An unexpected exception ends all sessions."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                link, replica = await self._to_open.get()
                if self._links.get(link.address) is link:
                    self._tasks[link] = tasks.create_task(link.run(replica))
