"""The scheduler plans each step shortly before the running step ends. All services are real. The
worker's steps take 120 ms.
"""

import asyncio
import itertools
import statistics
import time

from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt
from tests.scheduler.timed_worker import TimedWorker

STEP_SECONDS = 0.120
NUM_MEASURED, NUM_REQUESTS = 10, 4
NUM_TOKENS = 36


async def test_a_request_that_comes_in_the_middle_of_a_step_is_part_of_the_next() -> None:
    worker, came = TimedWorker(STEP_SECONDS), dict[int, float]()
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(0, prompt(9), sampling=sampling(NUM_TOKENS))
        for number in range(1, NUM_REQUESTS + 1):
            await gateway.until_tokens(0, NUM_MEASURED + 5 * number)
            await asyncio.sleep(STEP_SECONDS / 3)
            came[number] = time.monotonic()
            await gateway.add(number, prompt(9, 100 * number), sampling=sampling(2))
        await gateway.finish(*range(NUM_REQUESTS + 1))
        await replica.until_idle()
    assert gateway.heard[0].tokens == continuation(prompt(9), NUM_TOKENS)
    steps = [ran for ran in worker.ran if ran.message.rows]
    admissions = [ran.began for ran in steps if ran.message.new_requests][1:]
    waits = [admitted - sent for admitted, sent in zip(admissions, came.values(), strict=True)]
    # Each request was sent 2/3 of a step before the running step ended. If it had missed the next
    # step, it would have waited for 5/3 of a step. Only on a busy machine may some requests miss
    # it.
    assert sorted(waits)[1] < STEP_SECONDS, waits
    gaps = [after.began - before.ended for before, after in itertools.pairwise(steps)]
    assert statistics.median(gaps) < STEP_SECONDS / 10, gaps
