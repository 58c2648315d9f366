"""The compute thread runs functions one after another, and drops cancelled functions."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from services.common.process.watchdog.silence import ProcessTimes, Reading, ThreadTimes
from services.worker.adapters.compute import ComputeThread, follow_liveness

SECONDS = 60.0


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    compute = ComputeThread()
    yield compute
    compute.close()


async def test_functions_run_in_order_in_one_other_thread(compute: ComputeThread) -> None:
    ran: list[tuple[int, int]] = []
    numbers = [
        compute.submit(lambda number=number: ran.append((number, threading.get_ident())) or number)
        for number in range(20)
    ]
    async with asyncio.timeout(SECONDS):
        assert await asyncio.gather(*numbers) == list(range(20))
    assert [number for number, _ in ran] == list(range(20))
    (thread,) = {thread for _, thread in ran}
    assert thread != threading.get_ident()


async def test_an_exception_is_set_on_its_future_and_the_next_function_runs(
    compute: ComputeThread,
) -> None:
    failing, fine = compute.submit(lambda: 1 // 0), compute.submit(lambda: 2)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await fine == 2


async def test_a_function_cancelled_before_it_starts_is_not_run(compute: ComputeThread) -> None:
    going_on, ran = threading.Event(), []
    first = compute.submit(lambda: going_on.wait(SECONDS))
    dropped = compute.submit(lambda: ran.append("dropped"))
    last = compute.submit(lambda: ran.append("last"))
    dropped.cancel()
    going_on.set()
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(first, last)
    assert ran == ["last"]


async def test_the_end_callback_runs_in_the_loop_when_the_future_is_done(
    compute: ComputeThread,
) -> None:
    told: list[tuple[int, bool]] = []
    all_told = asyncio.Event()
    going_on = threading.Event()

    def ended(number: int) -> None:
        told.append((number, futures[number].done()))
        assert asyncio.get_running_loop() is loop
        if len(told) == len(futures):
            all_told.set()

    loop = asyncio.get_running_loop()
    functions = [lambda: going_on.wait(SECONDS), lambda: 1 // 0, lambda: 2]
    futures = [
        compute.submit(function, ended=lambda number=number: ended(number))
        for number, function in enumerate(functions)
    ]
    futures[2].cancel()
    going_on.set()
    async with asyncio.timeout(SECONDS):
        await all_told.wait()
    assert told == [(0, True), (1, True), (2, True)]
    assert await futures[0]
    assert isinstance(futures[1].exception(), ZeroDivisionError)


async def test_the_download_thread_waits_while_the_compute_thread_computes(
    compute: ComputeThread,
) -> None:
    computed = threading.Event()
    waiting = compute.submit_wait(lambda: computed.wait(SECONDS))
    async with asyncio.timeout(SECONDS):
        await compute.submit(computed.set)
        assert await waiting


async def test_closing_waits_for_what_runs_and_drops_what_is_queued() -> None:
    compute, begun, going_on = ComputeThread(), threading.Event(), threading.Event()
    ran: list[str] = []

    def run() -> None:
        begun.set()
        going_on.wait(SECONDS)
        ran.append("running")

    running, queued = compute.submit(run), compute.submit(lambda: ran.append("queued"))
    assert await asyncio.to_thread(begun.wait, SECONDS)
    closing = asyncio.create_task(asyncio.to_thread(compute.close))
    async with asyncio.timeout(SECONDS):
        while not compute.is_closed:  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0)
        going_on.set()
        await closing
        await running
        with pytest.raises(asyncio.CancelledError):
            await queued
    assert ran == ["running"]


async def test_a_function_that_runs_for_longer_than_it_may_is_overdue(
    compute: ComputeThread,
) -> None:
    going = threading.Event()
    await compute.submit(lambda: None, 0.0)
    assert compute.overdue is None
    running = compute.submit(going.wait, 0.05)
    async with asyncio.timeout(SECONDS):
        while compute.overdue is None:  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.01)
        assert compute.overdue.allowed_seconds == 0.05
        going.set()
        await running
    assert compute.overdue is None


async def test_a_function_without_a_time_limit_is_never_overdue(compute: ComputeThread) -> None:
    going = threading.Event()
    running = compute.submit(going.wait)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(running), 0.1)
    assert compute.overdue is None
    going.set()
    await running


async def test_a_worker_is_not_live_while_something_is_overdue(compute: ComputeThread) -> None:
    states: asyncio.Queue[bool] = asyncio.Queue()
    following = asyncio.create_task(follow_liveness(compute, states.put, period_seconds=0.02))
    going = threading.Event()
    running = compute.submit_wait(going.wait, 0.05)
    async with asyncio.timeout(SECONDS):
        assert await states.get() is False
        going.set()
        await running
        assert await states.get() is True
    following.cancel()


async def test_a_worker_that_gets_no_processor_is_live(compute: ComputeThread) -> None:
    """The step counts as hanging when its thread has run for 50 ms. The thread gets a tenth of a
    processor, so the worker stays live for half a second.
    """
    states: asyncio.Queue[bool] = asyncio.Queue()
    began, going = time.monotonic(), threading.Event()

    def read(now: float) -> Reading:
        thread = ThreadTimes("R", 0.1 * (now - began), 0.0)
        return Reading(now, watched=[ProcessTimes({1: thread})])

    following = asyncio.create_task(follow_liveness(compute, states.put, 0.02, read))
    running = compute.submit_wait(going.wait, 0.05)
    async with asyncio.timeout(SECONDS):
        assert await states.get() is False
    assert time.monotonic() - began >= 0.5
    going.set()
    await running
    following.cancel()
