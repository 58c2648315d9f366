"""A bench for tests of the scheduler's engine (the loop that plans and sends steps). The engine's
ports are fakes, and tests identify requests by names.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.engine_core import LINGER_SECONDS, EngineCore, EngineState
from services.scheduler.core.kv_transfer import KVRole
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from tests.scenarios.connector import connected
from tests.scheduler.fakes import (
    SECONDS,
    FakeExecutor,
    FakeReplica,
    FragilePool,
    Inbox,
    ReadinessLog,
    Watcher,
)
from tests.scheduler.timed_executor import TimedExecutor

if TYPE_CHECKING:
    from tests.scenarios.stand_in_connector import StandInConnector

BLOCK_SIZE = 4


class Bench:
    """An engine whose ports (KV pool, workers, receiver of tokens, observers) are fakes."""

    def __init__(
        self,
        *,
        num_blocks: int = 50,
        connector: "StandInConnector | None" = None,
        step_seconds: float = 0.0,
        linger_seconds: float = LINGER_SECONDS,
        **config: Any,
    ) -> None:
        """A step takes `step_seconds` of the event loop, or one iteration if that is 0."""
        limits: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 120,
        }
        if connector is not None:
            config["kv_role"] = KVRole.BOTH
        shape = SchedulerConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, **limits | config)
        self.pool = FragilePool(shape)
        self.timed = TimedExecutor(BLOCK_SIZE, limits["max_num_seqs"], step_seconds)
        self.executor = (
            self.timed if step_seconds else FakeExecutor(BLOCK_SIZE, limits["max_num_seqs"])
        )
        self.replica = FakeReplica(self.pool, self.executor)
        self.inbox = Inbox()
        self.watcher = Watcher()
        self.readiness = ReadinessLog()

        def now() -> float:
            return asyncio.get_running_loop().time()

        scheduler = Scheduler(shape, self.pool, connected(connector), now)
        self.engine = EngineCore(
            scheduler,
            self.executor,
            self.replica,
            self.inbox,
            self.watcher,
            self.readiness,
            now,
            linger_seconds,
        )
        self._num_requests = 0
        self._num_usable_blocks = num_blocks - 1

    def add(self, name: str, token_ids: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(
            name, self._num_requests, list(token_ids), len(token_ids), sampling, **fields
        )
        self.engine.changes.add(request)
        return request

    async def until_tokens(self, name: str, count: int) -> None:
        await self.inbox.until(lambda: len(self.inbox.tokens.get(name, ())) >= count)

    async def until_ended(self, *names: str) -> None:
        await self.inbox.until(lambda: set(names) <= set(self.inbox.ended))

    async def until_idle(self) -> None:
        """Waits until the engine is idle. Checks that no blocks and no rows of the batch are
        used.
        """
        await eventually(lambda: self.engine.state is EngineState.IDLE)
        assert self.pool.num_free_blocks == self._num_usable_blocks
        assert self.executor.num_requests == 0
        assert self.watcher.num_planned >= self.watcher.num_done


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for a condition that must become true within a few iterations of the event loop."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - each turn of the loop may make it true
            await asyncio.sleep(0)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(bench.engine.run())
    try:
        yield bench
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
