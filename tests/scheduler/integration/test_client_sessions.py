"""Client sessions (requests that receive their input in turns) over the scheduler's gRPC: turns,
and the blocks that stay allocated between them.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.scheduler.adapters.gateways.submitter import HASH_INLINE_TOKENS
from tests.scheduler.fake_worker import BLOCK_SIZE, FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

FIRST, NEXT = prompt(9), prompt(3, 700)
HELD = [*FIRST, *continuation(FIRST, 4)[:-1]]
"""The tokens of a session after a turn of four output tokens. The last of them is dropped, because
no step has computed its keys and values.
"""


@pytest.fixture(params=[False, True], ids=["one step in flight", "two steps in flight"])
async def replica(request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    worker = FakeWorker(max_num_seqs=2, num_blocks=64)
    async with serving_replica(
        worker, async_scheduling=request.param, max_num_sessions=2
    ) as replica:
        yield replica


async def begin(gateway: Gateway, handle: int, first: list[int]) -> None:
    await gateway.add(handle, first, sampling=sampling(4), resumable=True)
    await gateway.until_turn(handle)


async def test_a_session_goes_on_from_its_blocks(replica: Replica, gateway: Gateway) -> None:
    await begin(gateway, 1, FIRST)
    (turn,) = gateway.heard[1].turns
    assert turn.reason == common_pb2.FINISH_REASON_LENGTH
    assert turn.times.prefill_nanos > 0
    assert gateway.heard[1].tokens == continuation(FIRST, 4)
    stats = await replica.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    assert stats.num_free_blocks == stats.num_usable_blocks - 3
    await gateway.until(lambda: any(not queue.num_running for queue in gateway.queues))
    assert gateway.queues[-1].num_free == 1, "of two places the session keeps one"

    await gateway.add_chunk(1, len(HELD), NEXT, sampling=sampling(5))
    said = await gateway.until_turn(1, 2)
    assert said[4:] == continuation([*HELD, *NEXT], 5)
    assert gateway.heard[1].num_cached_tokens == len(HELD)
    await gateway.abort(1)
    await gateway.finish(1)
    assert gateway.heard[1].finished is not None
    await replica.until_idle()


async def test_what_waits_for_input_is_shown_as_such(replica: Replica, gateway: Gateway) -> None:
    await begin(gateway, 1, FIRST)
    await gateway.add(2, prompt(5, 300), sampling=sampling(20))
    await gateway.finish(2)
    activity = await replica.stub.GetActivity(scheduler_pb2.GetActivityRequest())
    (request,) = activity.requests
    assert request.state == scheduler_pb2.REQUEST_STATE_WAITING_FOR_CHUNK
    assert request.wait_reason == scheduler_pb2.WAIT_REASON_SESSION


async def test_input_that_does_not_fit_the_session_ends_it(
    replica: Replica, gateway: Gateway
) -> None:
    for handle, num_tokens, chunk, code in (
        (1, len(HELD) + 1, NEXT, "OTHER_TOKENS"),
        (2, len(HELD), [], "INVALID_ARGUMENT"),
        (3, len(HELD), prompt(190), "LONGER_THAN_MODEL"),
    ):
        await begin(gateway, handle, FIRST)
        await gateway.add_chunk(handle, num_tokens, chunk)
        await gateway.finish(handle)
        rejected = gateway.heard[handle].rejected
        assert rejected is not None
        assert rejected.reason == code
        await replica.until_idle()
    await gateway.add_chunk(3, 1, NEXT)
    await gateway.finish(3)


async def test_a_second_input_for_one_turn_ends_the_session(
    replica: Replica, gateway: Gateway
) -> None:
    """Each input fits in the session, but both together are longer than the model allows."""
    await begin(gateway, 1, FIRST)
    for first in (300, 600):
        await gateway.add_chunk(1, len(HELD), prompt(150, first))
    await gateway.finish(1)
    rejected = gateway.heard[1].rejected
    assert rejected is not None
    assert rejected.reason == "NO_SESSION"
    await replica.until_idle()
    assert len({step.generation for step in replica.worker.steps}) == 1


async def test_a_session_too_many_ends_with_its_turn(replica: Replica, gateway: Gateway) -> None:
    await begin(gateway, 1, FIRST)
    await begin(gateway, 2, prompt(5, 300))
    await gateway.abort(1, 2)
    await replica.until_idle()
    await gateway.add(3, FIRST, sampling=sampling(60), resumable=True)
    await gateway.add(4, FIRST, sampling=sampling(60), resumable=True)
    await gateway.add(5, FIRST, sampling=sampling(2), resumable=True)
    await gateway.finish(5)
    assert not gateway.heard[5].turns


async def test_sessions_that_hold_all_places_let_the_engine_sleep_and_give_way(
    replica: Replica, gateway: Gateway
) -> None:
    await begin(gateway, 1, FIRST)
    await begin(gateway, 2, prompt(5, 300))
    await gateway.add(3, prompt(5, 500), sampling=sampling(3))
    await replica.until(lambda stats: stats.num_waiting == 3)
    await asyncio.sleep(0.3)
    num_steps = (await replica.stats()).num_steps
    await asyncio.sleep(0.3)
    assert (await replica.stats()).num_steps == num_steps, "nothing can be planned"
    await gateway.finish(3, 1)
    assert gateway.heard[3].tokens == continuation(prompt(5, 500), 3)
    rejected = gateway.heard[1].rejected
    assert rejected is not None
    assert rejected.reason == "SESSION_GIVEN_UP"
    assert gateway.heard[2].finished is None
    assert gateway.heard[2].rejected is None


async def test_sessions_that_lack_each_others_blocks_do_not_wait_for_ever() -> None:
    worker = FakeWorker(max_num_seqs=2, num_blocks=17, max_model_len=60)
    async with (
        serving_replica(worker, max_num_sessions=2) as replica,
        gateway_of(replica) as gateway,
    ):
        for handle in (1, 2):
            await begin(gateway, handle, prompt(25, 100 * handle))
        for handle in (1, 2):
            await gateway.add_chunk(handle, 28, prompt(10, 700), sampling=sampling(4))
        await gateway.until(
            lambda: (
                any(len(heard.turns) == 2 for heard in gateway.heard.values())
                and any(heard.rejected is not None for heard in gateway.heard.values())
            )
        )


async def test_a_session_gives_way_to_a_request_that_lacks_a_slot_for_its_adapter() -> None:
    first, second = (
        common_pb2.Adapter(digest=bytes([number]) * 32, name=str(number)) for number in (1, 2)
    )
    async with (
        serving_replica(FakeWorker(max_loras=1), max_num_sessions=2) as replica,
        gateway_of(replica) as gateway,
    ):
        await gateway.add(1, FIRST, sampling=sampling(4), resumable=True, adapter=first)
        await gateway.until_turn(1)
        await begin(gateway, 2, prompt(5, 300))
        await gateway.add(3, prompt(5, 500), sampling=sampling(3), adapter=second)
        await gateway.finish(3, 1)
        rejected = gateway.heard[1].rejected
        assert rejected is not None
        assert rejected.reason == "SESSION_GIVEN_UP"
        assert gateway.heard[2].rejected is None, "this session uses no adapter"


async def test_a_lost_worker_costs_a_session_no_token(replica: Replica, gateway: Gateway) -> None:
    await begin(gateway, 1, FIRST)
    await replica.worker.stop()
    await replica.worker.start()
    await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_IDLE)
    await gateway.add_chunk(1, len(HELD), NEXT, sampling=sampling(5))
    said = await gateway.until_turn(1, 2)
    assert said[4:] == continuation([*HELD, *NEXT], 5)


async def test_a_drain_ends_sessions_between_turns(replica: Replica, gateway: Gateway) -> None:
    """The session is refused and not finished: a gateway may have sent its next turn meanwhile, and
    then sends that turn to another replica.
    """
    await begin(gateway, 1, FIRST)
    await replica.admin.Drain(scheduler_pb2.DrainRequest())
    await gateway.finish(1)
    heard = gateway.heard[1]
    assert heard.finished is None
    assert heard.rejected is not None
    assert heard.rejected.reason == "DRAINING"
    await replica.until_idle()
    await replica.admin.Undrain(scheduler_pb2.UndrainRequest())
    await begin(gateway, 2, FIRST)


async def test_long_input_is_hashed_beside_the_steps_and_found_by_others() -> None:
    worker = FakeWorker(num_blocks=2000, max_model_len=4000, max_num_batched_tokens=512)
    long = [token % 900 + 3 for token in range(HASH_INLINE_TOKENS + 100)]
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await begin(gateway, 1, FIRST)
        await gateway.add_chunk(1, len(HELD), long, sampling=sampling(2))
        said = await gateway.until_turn(1, 2)
        assert said[4:] == continuation([*HELD, *long], 2)
        await gateway.add(2, [*HELD, *long], sampling=sampling(1))
        await gateway.finish(2)
        whole = (len(HELD) + len(long) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert gateway.heard[2].num_cached_tokens == whole
