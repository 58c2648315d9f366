"""Fake schedulers that register themselves in Redis like real schedulers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.scheduler.adapters.gateways.registration import Registration
from services.scheduler.settings import SchedulerSettings
from tests.gateway.fake_scheduler import FakeScheduler


class Registered:
    def __init__(self, scheduler: FakeScheduler, redis_url: str, model_name: str) -> None:
        self.scheduler = scheduler
        settings = SchedulerSettings(
            kvpool="127.0.0.1:1",
            workers=("127.0.0.1:2",),
            redis_url=redis_url,
            address=scheduler.address,
        )
        self.registration = Registration(settings)
        node = f"node-of-{scheduler.address}"
        running = self.registration.run(scheduler.address, model_name, node)
        self._task = asyncio.create_task(running)

    async def leave(self) -> None:
        """Drains like a real scheduler: removes the registration, then refuses requests."""
        await self._cancel()
        await self.registration.leave()
        self.scheduler.set_state(ready=False, reason="the scheduler is draining", draining=True)

    async def die(self) -> None:
        """Ends the registration and the server at once, like a killed process."""
        await self._cancel()
        await self.scheduler.die()

    async def _cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.registration.close()


@asynccontextmanager
async def registered(
    redis_url: str, scheduler: FakeScheduler | None = None, *, model_name: str = "tiny"
) -> AsyncIterator[Registered]:
    """A fake scheduler that serves and is registered until the `with` block ends."""
    scheduler = scheduler or FakeScheduler()
    await scheduler.start()
    running = Registered(scheduler, redis_url, model_name)
    try:
        yield running
    finally:
        await running.die()
