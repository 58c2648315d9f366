"""A worker or pool serves one scheduler. A second scheduler waits, and logs the reason."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from stepwell.scheduler.v1 import scheduler_pb2

from services.scheduler.__main__ import serve
from services.scheduler.settings import SchedulerSettings
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.settings import WorkerSettings
from tests.scheduler.serving_replica import (
    SECONDS,
    Gateway,
    Replica,
    gateway_of,
    sampling,
    serving_replica,
)
from tests.tiny_models import save_tiny_model
from tests.worker.serving_worker import ServingWorker

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tiny") / "llama-tiny"
    save_tiny_model(directory, "llama")
    settings = WorkerSettings(model=directory, max_num_seqs=4, num_blocks=40)
    return build_worker(settings, "incarnation", lambda: None)


@asynccontextmanager
async def another_scheduler(
    replica: Replica, directory: Path, name: str
) -> AsyncIterator[asyncio.Task[None]]:
    """A second scheduler, running in a task, for the pool service and the worker of a replica."""
    stop = asyncio.Event()
    settings = SchedulerSettings(
        kvpool=replica.pool_address,
        workers=replica.worker_addresses,
        address=f"unix:{directory / 'second'}",
        replica=name,
        drain_seconds=0.0,
    )
    serving = asyncio.create_task(serve(settings, stop))
    try:
        yield serving
    finally:
        stop.set()
        await asyncio.wait({serving}, timeout=SECONDS)
        serving.result()


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(SECONDS):
        while text not in caplog.text:  # noqa: ASYNC110 - any task may log it
            await asyncio.sleep(0.01)


async def keep_busy(gateway: Gateway, handle: int) -> None:
    params = sampling(400, eos_token_ids=[])
    await gateway.add(handle, PROMPT, sampling=params)
    await gateway.until_tokens(handle, 3)


@pytest.mark.parametrize(("name", "what"), [("replica-1", "worker"), ("replica-0", "pool")])
async def test_two_schedulers_do_not_take_a_worker_from_each_other(
    loaded: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, what: str
) -> None:
    """The second scheduler has either another name, and thus another pool, or the same name and a
    later start, with which it takes over the first one's pool.
    """
    caplog.set_level(logging.INFO)
    async with serving_replica(ServingWorker(loaded)) as replica, gateway_of(replica) as gateway:
        await keep_busy(gateway, 1)
        async with another_scheduler(replica, tmp_path, name):
            if what == "worker":
                await until_logged(caplog, "is in use by scheduler 'replica-0', started at")
                tokens = len(gateway.heard[1].tokens)
                await gateway.until_tokens(1, tokens + 3)
                assert (await replica.stats()).num_preemptions == 0
            else:
                await until_logged(caplog, f"the {what} 'replica-0' is in use by scheduler")
                stats = await replica.stats()
                assert stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING
                assert not gateway.states[-1].ready
                await until_logged(caplog, "serving on unix:")
        assert caplog.text.count("; recovering") <= 1, "neither takes back what it lost"


async def test_a_scheduler_that_waits_serves_when_the_first_has_gone(
    loaded: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        serving_replica(ServingWorker(loaded)) as replica,
        another_scheduler(replica, tmp_path, "replica-1"),
    ):
        await until_logged(caplog, "is in use by scheduler 'replica-0'")
        replica.stop.set()
        await asyncio.wait({replica.serving}, timeout=SECONDS)
        await until_logged(caplog, f"serving on unix:{tmp_path}")
