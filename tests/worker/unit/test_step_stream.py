"""Answers may be completed by any thread. A stream sends them in the order of the steps."""

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from stepwell.worker.v1 import worker_pb2

from services.common.telemetry.tracing import configure_tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.step_stream import StepStream
from services.worker.adapters.telemetry import StepTracer
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput, no_ints

NUM_STEPS = 40
SECONDS = 60.0


class EchoRunner:
    @property
    def limits(self) -> BatchLimits:
        raise AssertionError("not used")

    def reset(self) -> None: ...

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        return self.execute(step)

    def execute(self, step: StepInput) -> StepOutput:
        if step.step == NUM_STEPS:
            raise ValueError("the last step fails")
        sampled = np.array([step.step], np.int32)
        return StepOutput(1, step.step, np.ones(1, np.int32), sampled, nan_requests=no_ints())


class Scheduler:
    """Receives answers. The answers to the steps `blocked` cannot be sent at once."""

    def __init__(self, blocked: frozenset[int]) -> None:
        self.answered: list[int] = []
        self.num_at_once = 0
        self._blocked = blocked
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()

    def write_at_once(self, response: worker_pb2.ExecuteResponse) -> bool:
        assert threading.get_ident() != self._loop_thread
        for _ in range(3):  # the event loop may try to send answers now
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(SECONDS)
        if response.step in self._blocked:
            return False
        self.answered.append(response.step)
        self.num_at_once += 1
        return True

    async def write(self, response: worker_pb2.ExecuteResponse) -> None:
        await asyncio.sleep(0)  # the compute thread may run the next step now
        self.answered.append(response.step)


def request(number: int) -> worker_pb2.ExecuteRequest:
    return worker_pb2.ExecuteRequest(
        generation=1,
        step=number,
        rows=bytes(4),
        num_scheduled_tokens=np.ones(1, np.int32).tobytes(),
        num_computed_tokens=bytes(4),
    )


async def requests(last: int) -> AsyncIterator[worker_pb2.ExecuteRequest]:
    for number in range(2, last + 1):
        yield request(number)


def stream_to(scheduler: Scheduler, compute: ComputeThread, *, at_once: bool) -> StepStream:
    return StepStream(
        EchoRunner(),
        compute,
        StepTracer(configure_tracing("worker", "", 0.0), 0),
        WorkerMetrics(),
        scheduler.write,
        scheduler.write_at_once if at_once else None,
        has_other_ranks=False,
    )


@pytest.mark.parametrize(
    ("blocked", "at_once"),
    [
        pytest.param((), True, id="every answer can be sent at once"),
        pytest.param(range(3, NUM_STEPS, 5), True, id="one in five cannot"),
        pytest.param(range(NUM_STEPS), True, id="none can"),
        pytest.param((), False, id="the stream has no such way"),
    ],
)
async def test_answers_are_in_the_order_of_steps(blocked: range, at_once: bool) -> None:
    compute, scheduler = ComputeThread(), Scheduler(frozenset(blocked))
    stream = stream_to(scheduler, compute, at_once=at_once)
    async with asyncio.timeout(SECONDS):
        await stream.run(request(1), requests(NUM_STEPS - 1))
    compute.close()
    assert scheduler.answered == list(range(1, NUM_STEPS))
    if at_once and not blocked:
        assert scheduler.num_at_once == NUM_STEPS - 1
    elif not at_once or len(blocked) == NUM_STEPS:
        assert scheduler.num_at_once == 0
    else:
        assert scheduler.num_at_once > 0


async def test_a_failed_step_ends_the_stream_after_the_answers_before_it() -> None:
    compute, scheduler = ComputeThread(), Scheduler(frozenset())
    stream = stream_to(scheduler, compute, at_once=True)
    with pytest.raises(ValueError, match="the last step fails"):
        async with asyncio.timeout(SECONDS):
            await stream.run(request(1), requests(NUM_STEPS + 3))
    compute.close()
    assert scheduler.answered == list(range(1, NUM_STEPS))
