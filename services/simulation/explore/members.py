"""Builds the services of a fleet, with the settings and the replaced parts that a run needs."""

import asyncio
import json
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from services.common.request.adapter import Adapter
from services.common.telemetry.tracing import configure_tracing
from services.gateway.__main__ import Gateway
from services.gateway.settings import GatewaySettings
from services.kvpool import __main__ as kvpool
from services.kvpool.settings import KVPoolSettings
from services.scheduler import __main__ as scheduler
from services.scheduler.adapters.telemetry import step_log
from services.scheduler.settings import SchedulerSettings
from services.simulation.explore import shared
from services.simulation.runtime.disk import MemoryFile, VirtualWriter
from services.simulation.runtime.lane import VirtualLane
from services.simulation.runtime.machine import end_process, outside
from services.simulation.runtime.memory_redis import MemoryRedis
from services.simulation.runtime.network import current_process
from services.simulation.runtime.rank_group import MemoryGroup
from services.simulation.runtime.tier_loads import VirtualLoads
from services.worker import service as worker
from services.worker.adapters.compute import ComputeThread
from services.worker.backends.choices import DeviceSetting
from services.worker.build import build_worker
from services.worker.core.kv import load_thread
from services.worker.core.worker import Worker
from services.worker.models.pooling_config import RunnerSetting
from services.worker.parallel.group import Group
from services.worker.settings import WorkerSettings

REDIS = "redis"
NUM_BLOCKS, NUM_FEW_BLOCKS = 24, 14
"""The number of blocks of a pool, and of a small pool, in which few requests fit."""
DEVICE = files("services.simulation.explore") / "device.toml"
_RESUBMIT_SECONDS = 300.0
"""How long gateways try to resubmit a request: longer than all faults of a run."""
_STEP_SECONDS = 3.0
"""The time after which a worker that does not reply counts as hung."""
_IDLE_SECONDS = 8.0
"""The time after which a client's idle session ends."""

Serve = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of services, and options of the workers and schedulers."""

    num_replicas: int = 1
    num_gateways: int = 1
    num_ranks: int = 1
    num_blocks: int = NUM_BLOCKS
    pools: bool = False
    """Whether the model computes embeddings."""
    drafts: str = ""
    """The method of speculative decoding. Empty if there is none."""
    tier_gib: float = 0.0
    """Memory for offloaded blocks, in GiB. 0.001 is enough for about twenty blocks."""
    has_redis: bool = False
    """Whether schedulers register in Redis, and pools write their cached prefixes to it."""
    has_step_log: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings of the schedulers: pairs of a name and a value."""

    def setting(self, name: str) -> Any:
        """Returns a scheduler setting of `settings`, or None if the setting has its default."""
        return dict(self.settings).get(name)


def service_names(shape: Shape) -> list[str]:
    """The names of the services, in the order in which they are started."""
    redis, replicas = [REDIS] if shape.has_redis else [], range(shape.num_replicas)
    of_replicas = [
        name
        for number in replicas
        for name in (f"pool-{number}", *worker_names(number, shape), f"scheduler-{number}")
    ]
    return [*redis, *of_replicas, *(f"gateway-{number}" for number in range(shape.num_gateways))]


def worker_names(number: int, shape: Shape) -> list[str]:
    """The names of a replica's workers, in order of rank."""
    return [f"worker-{number}", *(f"worker-{number}-{rank}" for rank in range(1, shape.num_ranks))]


def links(shape: Shape) -> list[tuple[str, str]]:
    """The pairs of services that send messages to each other."""
    gateways = [name for name in service_names(shape) if name.startswith("gateway")]
    found = []
    for number in range(shape.num_replicas):
        pool, scheduler, workers = (
            f"pool-{number}",
            f"scheduler-{number}",
            worker_names(number, shape),
        )
        found += [(scheduler, pool), *((scheduler, worker) for worker in workers)]
        found += [(workers[0], worker) for worker in workers[1:]]
        found += [(name, gateway) for name in (pool, scheduler) for gateway in gateways]
        found += [(name, REDIS) for name in (pool, scheduler) if shape.has_redis]
    return [*found, *((gateway, REDIS) for gateway in gateways if shape.has_redis)]


class Members:
    """Creates the coroutine functions that run the services."""

    def __init__(self, model: Path, shape: Shape, loop: asyncio.AbstractEventLoop) -> None:
        self._model = model
        self._shape = shape
        self._loop: Any = loop
        self._tokenizer = shared.tokenizer(model)
        self._adapters = shared.adapters(model)
        self._redis_url = f"redis://{REDIS}:6379" if shape.has_redis else None

    def serve(self, name: str, device_faults: list[str]) -> Serve:
        """Returns the function that runs a service. The first process of a worker removes
        `device_faults` from the list and has these faults.
        """
        kind, number, rank = [*name.split("-"), "0", "0"][:3]
        match kind:
            case "pool":
                return self._pool(int(number))
            case "worker":
                return self._worker(int(number), int(rank), device_faults)
            case "scheduler":
                return self._scheduler(int(number))
            case "gateway":
                return self._gateway(int(number))
        return self._redis

    async def _redis(self, stop: asyncio.Event) -> None:
        memory = current_process().inside = MemoryRedis()
        listener = self._loop.servers.listener((REDIS, 6379))
        server = await asyncio.start_server(memory.serve, sock=listener)
        await stop.wait()
        server.close()

    def _pool(self, number: int) -> Serve:
        settings = KVPoolSettings(address=f"pool-{number}:9002", redis_url=self._redis_url)
        return lambda stop: kvpool.serve(settings, stop)

    def _scheduler(self, number: int) -> Serve:
        settings = SchedulerSettings(
            address=f"scheduler-{number}:9001",
            kvpool=f"pool-{number}:9002",
            workers=tuple(f"{name}:9003" for name in worker_names(number, self._shape)),
            replica=f"replica-{number}",
            max_queue_seconds=0.0,
            step_timeout_seconds=_STEP_SECONDS,
            redis_url=self._redis_url,
            step_log=Path("steps.jsonl") if self._shape.has_step_log else None,
            **dict(self._shape.settings),
        )
        return lambda stop: scheduler.serve(settings, stop)

    def _worker(self, number: int, rank: int, faults: list[str]) -> Serve:
        names = worker_names(number, self._shape)
        shape, generates = self._shape, not self._shape.pools

        async def serve(stop: asyncio.Event) -> None:
            script = "; ".join(faults)
            faults.clear()
            settings = WorkerSettings(
                model=self._model,
                address=f"{names[rank]}:9003",
                tensor_parallel_size=shape.num_ranks,
                rank=rank,
                master_addr=names[0],
                device=DeviceSetting.SIMULATED,
                profile=str(DEVICE),
                device_faults=script or None,
                num_blocks=shape.num_blocks,
                max_num_seqs=6,
                max_num_batched_tokens=48,
                num_threads=1,
                runner=RunnerSetting.GENERATE if generates else RunnerSetting.POOLING,
                enable_lora=generates,
                max_cpu_loras=2,
                speculative_config=_speculation(shape.drafts, self._model),
                kv_offloading_size=shape.tier_gib or None,
            )
            tracing = configure_tracing("worker", "", 1.0)
            is_group = shape.num_ranks > 1
            compute = ComputeThread(lambda _: VirtualLane(self._loop, may_wait=is_group))
            service = worker.WorkerService(settings, tracing, None, compute, self._load)
            try:
                await service.run(stop)
            finally:
                await service.close(stop)

        return serve

    def _gateway(self, number: int) -> Serve:
        replicas, redis_url = range(self._shape.num_replicas), self._redis_url
        schedulers = tuple(f"scheduler-{replica}:9001" for replica in replicas)
        settings = GatewaySettings(
            model=self._model,
            schedulers=schedulers if redis_url is None else None,
            redis_url=redis_url,
            http_address=f"gateway-{number}:8000",
            address=f"gateway-{number}:9000",
            trace_slowest_per_minute=0,
            resubmit_timeout_seconds=_RESUBMIT_SECONDS,
            client_session_idle_seconds=_IDLE_SECONDS,
        )

        async def serve(stop: asyncio.Event) -> None:
            tracing = configure_tracing("gateway", "", 1.0)
            gateway = Gateway(settings, self._tokenizer, tracing)
            for adapter in self._adapters:
                gateway.parts.inference.adapters.add(adapter)
            await gateway.start()
            current_process().inside = gateway
            await gateway.serve_until(stop)

        return serve

    def _load(
        self, settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
    ) -> Worker:
        incarnation = uuid.uuid4().hex
        with outside():
            built = build_worker(settings, incarnation, checkpoint_reached, group)
        runner: Any = built.runner
        current_process().inside = runner.runner
        if (adapters := built.adapters) is not None:
            load = adapters.load

            def load_found(digest: bytes, directory: Path, kept: Collection[bytes] = ()) -> None:
                load(digest, self._adapters[Adapter(digest, directory.name, str(directory))], kept)

            adapters.load = load_found  # type: ignore[method-assign]
        return built


def _look_into(module: Any, name: str) -> None:
    """Makes each instance of a class the main object (`inside`) of the process that creates it."""

    class Seen(getattr(module, name)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            current_process().inside = self

    setattr(module, name, Seen)


_look_into(kvpool, "PoolService")
_look_into(scheduler, "SchedulerService")
load_thread.LoadThread = VirtualLoads  # type: ignore[misc, assignment]
step_log.create_log_file = lambda _: MemoryFile()  # type: ignore[assignment, return-value]
step_log.WriterThread = VirtualWriter  # type: ignore[misc, assignment]
worker.Group = MemoryGroup  # type: ignore[attr-defined]
worker.end_at_once = end_process  # type: ignore[attr-defined, assignment]


def _speculation(method: str, model: Path) -> str | None:
    if not method:
        return None
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(model)
    return json.dumps(config)
