"""Functions that write the step log of a live replica, and that run `stepwell replay` on it."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.cli.__main__ import main
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

HANDLES = range(24)

Disturbance = Callable[[Replica, Gateway], Coroutine[Any, Any, None]]


async def crowd(gateway: Gateway, num_tokens: int = 24) -> None:
    """Sends more requests than fit in a small pool. Some prompts have a common prefix."""
    for handle in HANDLES:
        shared, own = prompt(12, 50 * (handle % 3)), prompt(3 + handle % 7, 400 + 20 * handle)
        await gateway.add(
            handle,
            shared + own,
            sampling=sampling(num_tokens - handle % 5),
            cache_salt="salted" if handle % 11 == 0 else "",
        )


async def live_log(path: Path, disturb: Disturbance, **settings: Any) -> Path:
    """Writes the log of a replica with more requests than fit in its pool. `disturb` is called
    while the requests run. Returns `path`.
    """
    worker = FakeWorker(num_blocks=31, max_model_len=100)
    async with serving_replica(worker, step_log=path, **settings) as replica:
        async with gateway_of(replica) as gateway:
            await crowd(gateway)
            await disturb(replica, gateway)
            await gateway.finish(*HANDLES)
        await replica.until_idle()
    return path


def replay(*arguments: object) -> int:
    """Runs `stepwell replay`. Returns its exit status."""
    return main(["replay", *map(str, arguments)])


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Runs `stepwell replay`. Returns its exit status, standard output and standard error."""
    return replay(*arguments), *capsys.readouterr()
