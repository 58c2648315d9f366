"""A running replica: a real scheduler and pool, with workers that need no model by default."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.pool.block_hash import pack_token_ids
from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release
from services.common.rpc.status import from_rpc_error
from services.common.telemetry.tracing import configure_tracing
from services.kvpool.__main__ import PoolService
from services.kvpool.settings import KVPoolSettings
from services.scheduler.__main__ import serve
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.cuttable_proxy import CuttableProxy
from tests.scheduler.fake_worker import FakeWorker

SECONDS = 60.0


def sampling(max_tokens: int = 8, **fields: Any) -> common_pb2.SamplingParams:
    """Greedy sampling parameters, with all defaults set as a gateway sends them."""
    return common_pb2.SamplingParams(
        **{"temperature": 0, "seed": 1, "max_tokens": max_tokens} | fields
    )


def add_request(handle: int, prompt: Sequence[int], **fields: Any) -> scheduler_pb2.AddRequest:
    defaults = {
        "request_id": f"request-{handle}",
        "prompt_token_ids": pack_token_ids(prompt),
        "sampling": sampling(),
    }
    return scheduler_pb2.AddRequest(handle=handle, **defaults | fields)


@dataclass(slots=True)
class Heard:
    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    finished: scheduler_pb2.Finished | None = None
    rejected: scheduler_pb2.Rejection | None = None
    turns: list[scheduler_pb2.Finished] = field(default_factory=list)


class Gateway:
    def __init__(self, stub: scheduler_pb2_grpc.SchedulerStub) -> None:
        self.call = stub.Session()
        self.opened: scheduler_pb2.SessionOpened | None = None
        self.states: list[scheduler_pb2.ReplicaState] = []
        self.queues: list[scheduler_pb2.QueueState] = []
        self.loads: list[scheduler_pb2.ReplicaLoad] = []
        self.heard: dict[int, Heard] = {}
        self._admitted: set[int] = set()
        """Handles of admitted requests. Of a client's session, only the current turn counts."""
        self.error: Exception | None = None
        self._num_sent = self._num_received = 0
        self.taken = 0, 0
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @property
    def state(self) -> scheduler_pb2.ReplicaState | None:
        return self.states[-1] if self.states else None

    async def open(
        self, gateway_id: str = "gateway", release: common_pb2.Release | None = None
    ) -> scheduler_pb2.SessionOpened:
        """Opens the session. Returns the scheduler's answer, which describes the replica."""
        hello = scheduler_pb2.OpenSession(gateway_id=gateway_id, release=release or own_release())
        await self.say(open=hello)
        await self.until(lambda: self.opened is not None)
        assert self.opened is not None
        return self.opened

    async def say(self, **message: Any) -> None:
        self._num_sent += 1
        numbered = {"number": self._num_sent} | message
        await self.call.write(scheduler_pb2.SessionRequest(**numbered))

    async def add(self, handle: int, prompt: Sequence[int], **fields: Any) -> None:
        self.heard[handle] = Heard()
        self._admitted.discard(handle)
        await self.say(add=add_request(handle, prompt, **fields))

    async def add_chunk(
        self, handle: int, num_tokens: int, chunk: Sequence[int], **fields: Any
    ) -> None:
        """Sends further input to a client's session (request with turns) of `num_tokens` tokens."""
        defaults = {
            "request_id": f"request-{handle}",
            "token_ids": pack_token_ids(chunk),
            "num_tokens": num_tokens,
            "sampling": sampling(),
        }
        await self.say(chunk=scheduler_pb2.AddChunk(handle=handle, **defaults | fields))

    async def until_turn(self, handle: int, count: int = 1) -> list[int]:
        """Waits until `count` turns of a client's session have ended. Returns all output tokens."""
        heard = self.heard[handle]
        await self.until(lambda: len(heard.turns) >= count)
        assert heard.finished is None
        return heard.tokens

    async def abort(self, *handles: int) -> None:
        await self.say(abort=scheduler_pb2.AbortRequests(handles=handles))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_tokens(self, handle: int, count: int) -> None:
        await self.until(lambda: len(self.heard[handle].tokens) >= count)

    async def finish(self, *handles: int) -> None:
        await self.until(
            lambda: all(self.heard[h].finished or self.heard[h].rejected for h in handles)
        )

    async def until_ended(self) -> None:
        await asyncio.wait({self._reader}, timeout=SECONDS)
        assert self._reader.done()

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.wait({self._reader})

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self._num_received += 1
                assert response.number == self._num_received
                self.taken = response.taken_number, response.num_taken_requests
                match response.WhichOneof("message"):
                    case "opened":
                        self.opened = response.opened
                    case "state":
                        assert self.opened is not None, "opened comes first"
                        self.states.append(response.state)
                    case "queue":
                        self.queues.append(response.queue)
                    case "load":
                        self.loads.append(response.load)
                    case "deltas":
                        self._take(response.deltas)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass
        self._news.set()

    def _take(self, deltas: scheduler_pb2.StepDeltas) -> None:
        if deltas.HasField("queue"):
            self.queues.append(deltas.queue)
        if deltas.HasField("load"):
            self.loads.append(deltas.load)
        for admitted in deltas.admitted:
            assert admitted.handle not in self._admitted, "admitted once"
            self._admitted.add(admitted.handle)
            self.heard[admitted.handle].num_cached_tokens = admitted.num_cached_tokens
        start = 0
        for handle, count in zip(deltas.handles, deltas.num_tokens, strict=True):
            assert handle in self._admitted, "admitted before its tokens"
            self.heard[handle].tokens += deltas.token_ids[start : start + count]
            start += count
        assert start == len(deltas.token_ids)
        for finished in deltas.finished:
            assert self.heard[finished.handle].finished is None, "ends once"
            self.heard[finished.handle].finished = finished
        for turn in deltas.turns:
            self.heard[turn.handle].turns.append(turn)
            self._admitted.discard(turn.handle)
        for rejected in deltas.rejected:
            self.heard.setdefault(rejected.handle, Heard()).rejected = rejected


class Worker(Protocol):
    """A worker of one rank that the test's process serves."""

    async def start(self) -> str:
        """Starts to serve. Returns the address."""

    async def stop(self) -> None: ...


class Pool:
    """The pool service. Tests can stop it, and restart it at the same address."""

    def __init__(self, exporter: Any = None) -> None:
        self._exporter = exporter
        self._address = "127.0.0.1:0"
        self._service: PoolService | None = None

    async def start(self) -> str:
        """Starts to serve, at the address of the last start if there was one. Returns it."""
        tracing = configure_tracing("kvpool", "", 1.0, exporter=self._exporter)
        settings = KVPoolSettings(address=self._address, drain_seconds=0.0)
        self._service = PoolService(settings, tracing)
        self._address = await self._service.start()
        return self._address

    async def stop(self) -> None:
        if self._service is not None:
            service, self._service = self._service, None
            await service.drain()

    async def stats(self) -> kvpool_pb2.PoolStats:
        async with open_channel(self._address) as channel:
            answer = await kvpool_pb2_grpc.KVPoolStub(channel).GetStats(
                kvpool_pb2.GetStatsRequest()
            )
        (pool,) = answer.pools
        return pool


@dataclass(slots=True)
class Replica:
    """A running scheduler, with the pool and the workers of its replica."""

    address: str
    stub: scheduler_pb2_grpc.SchedulerStub
    admin: scheduler_pb2_grpc.SchedulerAdminStub
    pool: Pool
    workers: Sequence[Worker]
    link: CuttableProxy | None
    pool_address: str
    worker_addresses: tuple[str, ...]
    stop: asyncio.Event
    serving: asyncio.Task[None]

    @property
    def worker(self) -> FakeWorker:
        worker = self.workers[0]
        assert isinstance(worker, FakeWorker)
        return worker

    @property
    def pool_link(self) -> CuttableProxy:
        """The proxy between scheduler and pool, if the replica was started with `cuttable`."""
        assert self.link is not None
        return self.link

    async def stats(self) -> scheduler_pb2.GetStatsResponse:
        return await self.stub.GetStats(scheduler_pb2.GetStatsRequest())

    async def until(self, condition: Callable[[scheduler_pb2.GetStatsResponse], bool]) -> None:
        """Waits until the replica's statistics satisfy a condition."""
        async with asyncio.timeout(SECONDS):
            while not condition(await self.stats()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def planning_together(self, num_requests: int) -> AsyncIterator[None]:
        """Pauses the scheduler until the `num_requests` requests that the `async with` block sends
        are queued, so that one step can admit them together. Before, no request may run. The test
        must unblock the worker (`worker.going`) afterwards.
        """
        self.worker.going.clear()
        await self.admin.Pause(
            scheduler_pb2.PauseRequest(mode=scheduler_pb2.PauseMode.PAUSE_MODE_KEEP)
        )
        yield
        await self.until(lambda stats: stats.num_waiting == num_requests)
        await self.admin.Resume(scheduler_pb2.ResumeRequest())

    async def until_idle(self) -> None:
        """Waits until no request runs or waits, and no block or row of the batch is in use."""
        await self.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_IDLE)
        stats = await self.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_usable_blocks
        pool = await self.pool.stats()
        assert (pool.num_requests, pool.num_free_blocks) == (0, pool.num_usable_blocks)


@asynccontextmanager
async def serving_replica(
    *workers: Worker, pool: Pool | None = None, cuttable: bool = False, **settings: Any
) -> AsyncIterator[Replica]:
    """Starts a replica. With `cuttable`, a test can cut the link of scheduler and pool."""
    ranks = list(workers) or [FakeWorker()]
    pool = pool or Pool()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sw"))
        pool_address, link = await pool.start(), None
        stack.push_async_callback(pool.stop)
        if cuttable:
            link = CuttableProxy(pool_address)
            pool_address = await link.start()
            stack.push_async_callback(link.close)
        addresses = [await worker.start() for worker in ranks]
        for worker in ranks:
            stack.push_async_callback(worker.stop)
        address = f"unix:{Path(directory) / 'scheduler'}"
        stop = asyncio.Event()
        known = {"drain_seconds": 0.0} | settings
        task = asyncio.create_task(
            serve(
                SchedulerSettings(
                    kvpool=pool_address, workers=tuple(addresses), address=address, **known
                ),
                stop,
            )
        )
        stack.push_async_callback(_end, task, stop)
        channel = await stack.enter_async_context(open_channel(address))
        await until_serving(channel, task)
        yield Replica(
            address,
            scheduler_pb2_grpc.SchedulerStub(channel),
            scheduler_pb2_grpc.SchedulerAdminStub(channel),
            pool,
            ranks,
            link,
            pool_address,
            tuple(addresses),
            stop,
            task,
        )


@asynccontextmanager
async def gateway_of(replica: Replica) -> AsyncIterator[Gateway]:
    gateway = Gateway(replica.stub)
    try:
        await gateway.open()
        yield gateway
    finally:
        await gateway.close()


async def until_serving(
    channel: grpc.aio.Channel, serving: asyncio.Task[None] | None = None
) -> None:
    """Waits until the health check reports SERVING. Raises the error of a failed `serving`."""
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(SECONDS):
        while True:
            if serving is not None and serving.done():
                await serving
            with suppress(grpc.aio.AioRpcError):
                answer = await health.Check(health_pb2.HealthCheckRequest(service="ready"))
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.01)


async def _end(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    await asyncio.wait({task}, timeout=SECONDS)
    assert task.done()
