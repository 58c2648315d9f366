"""Some requests kill the worker process in each of their steps. Other requests are served."""

import pytest
from stepwell.common.v1 import common_pb2

from tests.scheduler.dying_worker import DyingWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

POISON = 777
INNOCENT = {handle: prompt(6 + handle, 100 * handle) for handle in range(5)}


@pytest.mark.parametrize("num_poisoned", [1, 2])
async def test_requests_that_kill_the_worker_are_ended_and_the_others_go_on(
    num_poisoned: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = DyingWorker(POISON)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle, token_ids in INNOCENT.items():
            await gateway.add(handle, token_ids, sampling=sampling(100))
        poisoned = range(10, 10 + num_poisoned)
        for handle in poisoned:
            await gateway.add(handle, [*prompt(5, 600), POISON], sampling=sampling(100))
        await gateway.finish(*INNOCENT, *poisoned)
        for handle, token_ids in INNOCENT.items():
            assert gateway.heard[handle].tokens == continuation(token_ids, 100)
        for handle in poisoned:
            finished = gateway.heard[handle].finished
            assert finished is not None
            assert finished.reason == common_pb2.FINISH_REASON_STEP_FAILED
            assert "lost the workers" in finished.message
        logged = [vars(one) for one in caplog.records if "every step with it" in one.getMessage()]
        assert {one["request_id"] for one in logged} == {f"request-{n}" for n in poisoned}
        assert worker.num_deaths <= 4 * num_poisoned, "no death for every request beside them"
        await replica.until_idle()


async def test_a_worker_that_is_killed_three_times_ends_no_request() -> None:
    worker = DyingWorker(POISON)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle, token_ids in INNOCENT.items():
            await gateway.add(handle, token_ids, sampling=sampling(150))
        for known in (3, 4, 5):
            await gateway.until_tokens(4, known)
            worker.kill()
        await gateway.finish(*INNOCENT)
        for handle, token_ids in INNOCENT.items():
            assert gateway.heard[handle].tokens == continuation(token_ids, 150)
        await replica.until_idle()
