"""Publishes to gateways and to the health service whether the replica can run steps."""

import asyncio
from collections.abc import Awaitable, Callable

from stepwell.scheduler.v1 import scheduler_pb2

from services.scheduler.adapters.gateways.sessions import Sessions

LOOK_SECONDS = 0.5


class ReplicaReadiness:
    """Sends the replica's state (whether steps can run) to every gateway at each change, and when
    nothing else was sent to the gateway for a second. `set_ready` updates the health service.
    """

    def __init__(self, sessions: Sessions, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._sessions = sessions
        self._set_ready = set_ready
        self.cannot_run_steps = asyncio.Event()
        """Set while the pool or a worker is unreachable."""
        self._reason = ""
        self._is_draining = False
        self._is_drained = False
        self._changed = asyncio.Event()

    def ready(self) -> None:
        self.not_ready("")

    def not_ready(self, reason: str) -> None:
        self._reason = reason
        if reason:
            self.cannot_run_steps.set()
        else:
            self.cannot_run_steps.clear()
        self._changed.set()

    def drain(self) -> None:
        """Announces that new requests are refused because this process is stopping."""
        self._is_draining = True
        self._changed.set()

    def set_drained(self, drained: bool) -> None:
        """Announces whether new requests are refused because an operator drained the replica."""
        self._is_drained = drained
        self._changed.set()

    async def run(self) -> None:
        loop, announced = asyncio.get_running_loop(), None
        while True:
            self._changed.clear()
            state = self._state()
            if state == announced:
                self._sessions.announce_to_quiet()
            else:
                await self._set_ready(state.ready)
                self._sessions.announce(state)
                announced = state
            timer = loop.call_later(LOOK_SECONDS, self._changed.set)
            await self._changed.wait()
            timer.cancel()

    def _state(self) -> scheduler_pb2.ReplicaState:
        reason, draining = self._reason, self._is_draining
        if not reason and draining:
            reason = "the scheduler is draining"
        elif not reason and self._is_drained:
            reason, draining = "an operator drained the replica", True
        return scheduler_pb2.ReplicaState(
            ready=not reason, reason=reason, draining=draining, stalled=bool(self._reason)
        )
