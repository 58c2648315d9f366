"""The objects of a finished request are freed at once and not by a garbage collection, because a
full collection would block the event loop.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.gateway.fake_scheduler import FULL, FakeScheduler
from tests.gateway.serving import Serving, serving, until

NUM_REQUESTS = 3
OURS = ("services.gateway.", "uvicorn.", "starlette.")


@contextmanager
def only_cycles_are_left() -> Iterator[Counter[str]]:
    """Counts, by type, the objects created in the block that only a garbage collection frees,
    because they refer to each other.
    """
    gc.collect()
    gc.freeze()  # later collections ignore the existing objects
    gc.disable()
    left: Counter[str] = Counter()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        left.update(name for name in names if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ask(served: Serving, seconds: float, *, stream: bool) -> httpx.Response:
    body = {"prompt": [10, 11, 12], "max_tokens": 8, "stream": stream, "ignore_eos": True}
    headers = {"Authorization": "Bearer one", "X-Request-Timeout": str(seconds)}
    return await served.http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("knobs", "seconds", "status"),
    [
        pytest.param({}, 60.0, 200, id="done"),
        pytest.param({"permits": 0}, 0.02, 504, id="too late"),
        pytest.param({"rejection": FULL}, 60.0, 503, id="refused by the scheduler"),
        pytest.param({"engine_error": "broken"}, 60.0, 500, id="failed"),
    ],
)
async def test_nothing_of_a_request_is_left_to_the_garbage_collector(
    model: Path, knobs: dict[str, object], seconds: float, status: int, *, stream: bool
) -> None:
    scheduler = FakeScheduler()
    async with serving(model, scheduler, api_keys=("one",)) as served:
        await ask(served, 60.0, stream=stream)  # creates shared objects
        for name, value in knobs.items():
            setattr(scheduler, name, value)
        await ask(served, seconds, stream=stream)
        with only_cycles_are_left() as left:
            for _ in range(NUM_REQUESTS):
                assert (await ask(served, seconds, stream=stream)).status_code == status
            await until(lambda: not served.gateway.gate.inside)
        assert not left
