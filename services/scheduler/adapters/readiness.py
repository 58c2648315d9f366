"""Whether a step can run, as sessions and health checks are told."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from stepwell.scheduler.v1 import scheduler_pb2

from services.scheduler.adapters.sessions import Sessions

HEARTBEAT_SECONDS = 1.0


class ReplicaReadiness:
    """A `Readiness` that tells every session at once, and again every second.

    `set_ready` is told of each change, for the health service.
    """

    def __init__(
        self,
        sessions: Sessions,
        set_ready: Callable[[bool], Awaitable[None]],
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._sessions = sessions
        self._set_ready = set_ready
        self._heartbeat_seconds = heartbeat_seconds
        self._lack = ""
        self._is_draining = False
        self._changed = asyncio.Event()

    def ready(self) -> None:
        self.not_ready("")

    def not_ready(self, reason: str) -> None:
        self._lack = reason
        self._changed.set()

    def drain(self) -> None:
        """From here on new requests are refused."""
        self._is_draining = True
        self._changed.set()

    async def run(self) -> None:
        """Keeps health and sessions informed until cancelled."""
        was_ready: bool | None = None
        while True:
            self._changed.clear()
            state = self._state()
            if state.ready is not was_ready:
                was_ready = state.ready
                await self._set_ready(state.ready)
            self._sessions.announce(state)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._changed.wait()

    def _state(self) -> scheduler_pb2.ReplicaState:
        reason = self._lack or ("the scheduler is draining" if self._is_draining else "")
        return scheduler_pb2.ReplicaState(
            ready=not reason, reason=reason, draining=self._is_draining
        )
