"""Pipeline parallelism: as many steps are in flight as there are stages. The scheduler's message
for a step contains, for each request, the last of the tokens that the step computes.
"""

import asyncio

from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import pack_token_ids, unpack_token_ids
from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.workers.answer_check import ModelFacts
from services.scheduler.adapters.workers.steps_in_flight import StepsInFlight
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt


def two_stages() -> list[FakeWorker]:
    return [FakeWorker(rank=rank, world_size=2, pipeline_parallel_size=2) for rank in range(2)]


async def test_each_step_has_the_last_of_the_tokens_that_it_computes() -> None:
    stages = two_stages()
    async with serving_replica(*stages) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(100), sampling=sampling(10))
        await gateway.finish(1)
        await replica.until_idle()
    tokens = [*prompt(100), *continuation(prompt(100), 10)]
    steps = [step for step in stages[0].steps if step.rows]
    # The budget of a step is 64 tokens. The last output token is not computed in any step.
    assert [unpack_token_ids(step.num_scheduled_tokens) for step in steps] == [
        [64],
        [36],
        *[[1]] * 9,
    ]
    lasts = [unpack_token_ids(step.last_token_ids) for step in steps]
    assert lasts == [[tokens[63]], *([token] for token in tokens[99:-1])]
    assert stages[1].steps == stages[0].steps


async def test_there_are_as_many_steps_in_flight_as_stages_and_no_request_decodes_in_two() -> None:
    stages = two_stages()
    async with serving_replica(*stages) as replica, gateway_of(replica) as gateway:
        stages[1].going.clear()
        for handle in range(3):
            await gateway.add(handle, prompt(40, 100 * handle), sampling=sampling(5))
        # Two steps compute the 120 prompt tokens. The third step waits for the answer to the first.
        await replica.until(lambda _: sum(bool(step.rows) for step in stages[0].steps) == 2)
        await asyncio.sleep(0.05)
        assert sum(bool(step.rows) for step in stages[0].steps) == 2
        stages[1].going.set()
        for handle in range(3):
            await gateway.finish(handle)
            expected = continuation(prompt(40, 100 * handle), 5)
            assert gateway.heard[handle].tokens == expected
        await replica.until_idle()


async def test_without_stages_no_token_is_sent_twice() -> None:
    worker = FakeWorker()
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9), sampling=sampling(5))
        await gateway.finish(1)
        await replica.until_idle()
    assert {step.last_token_ids for step in worker.steps} == {b""}


async def test_a_step_is_what_its_last_stage_answers_and_takes_as_long_as_all_of_them() -> None:
    def response(token_ids: list[int], nanos: int) -> worker_pb2.ExecuteResponse:
        return worker_pb2.ExecuteResponse(
            generation=3,
            step=1,
            num_tokens=pack_token_ids([len(token_ids)]),
            token_ids=pack_token_ids(token_ids),
            execute_nanos=nanos,
        )

    # Ranks a and b form the first stage, c and d the second. Rank a answers last.
    steps = StepsInFlight("abcd", Deadlines(1, 10))
    steps.num_stages = 2
    steps.model = ModelFacts(vocab_size=10)
    request = Request("r", RequestKey(1), [1], 1, SamplingParams())
    step = steps.add(3, SchedulerOutput(1, [request], [1], [0]), 10)
    for rank, nanos in {"b": 7, "c": 3, "d": 3}.items():
        step.answered(rank, response([5] if rank in "cd" else [], nanos))
        assert not step.output.done()
    step.answered("a", response([], 7))
    output = await step.output
    assert (output.token_ids, output.execute_nanos) == ([[5]], 10)


async def test_a_step_came_as_early_as_it_did_to_the_rank_that_had_it_last() -> None:
    def slack_of(**slacks: int | None) -> float | None:
        steps = StepsInFlight("abc", Deadlines(1, 10))
        step = steps.add(3, SchedulerOutput(1), 10)
        for rank, slack in slacks.items():
            response = worker_pb2.ExecuteResponse(generation=3, step=1, slack_nanos=slack)
            step.answered(rank, response)
        output: float | None = step.output.result().slack_seconds
        return output

    assert slack_of(a=5_000_000, b=-2_000_000, c=3_000_000) == -0.002
    assert slack_of(c=-4_000_000, a=5_000_000, b=1_000_000) == -0.004
    assert slack_of(a=None, b=None, c=None) is None
    three_days = 3 * 86_400
    assert slack_of(a=-three_days * 10**9, b=-1, c=-1) == -three_days  # idle before this step
