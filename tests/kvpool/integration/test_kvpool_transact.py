"""Transactions over gRPC are executed exactly once. They are accepted on one stream at a time, and
refused if they name an older generation (earlier opening) of the pool.
"""

import asyncio

import grpc
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound
from services.common.rpc import status
from services.common.telemetry.tracing import configure_tracing
from services.kvpool.__main__ import MAX_POOLS
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.servicer import KVPoolServicer
from services.kvpool.core import errors
from tests.kvpool import wire
from tests.kvpool.wire import Speaker


async def test_a_transaction_is_executed_in_order_and_answered(stub):
    opened = await stub.OpenPool(wire.open_request())
    speaker = Speaker(stub, opened.generation)
    first = await speaker.transact(
        wire.lookup(1, 8, "ab"),
        wire.admit(wire.admission(1, 9), wire.admission(2, 9, hit=8, path="ab")),
    )
    assert first.generation == opened.generation
    assert first.sequence == 1
    assert list(first.results[0].lookup.num_hit_tokens) == [0]
    tables = first.results[1].admit.groups[0]
    assert list(tables.num_blocks) == [3, 3]
    assert list(tables.block_ids) == [1, 2, 3, 1, 2, 4]  # request 2 hits blocks of request 1
    assert first.num_free_blocks == 5

    second = await speaker.transact(wire.release(2), wire.grow([1], [13]))
    assert second.results[0].WhichOneof("result") is None
    assert list(second.results[1].grow.groups[0].block_ids) == [4]
    assert not second.HasField("stop")


async def test_what_comes_before_the_first_misfit_is_done(stub):
    speaker = await opened_speaker(stub, num_blocks=6)
    await speaker.transact(wire.admit(wire.admission(1, 8), wire.admission(2, 8)))
    answer = await speaker.transact(wire.grow([1, 2], [12, 12]), wire.release(1))
    assert answer.stop == kvpool_pb2.Stop(
        operation_index=0, item_index=1, reason=kvpool_pb2.STOP_REASON_NO_BLOCKS
    )
    (result,) = answer.results
    assert list(result.grow.groups[0].num_blocks) == [1]
    assert list(result.grow.groups[0].block_ids) == [5]
    assert answer.num_free_blocks == 0


async def test_a_hit_that_changed_stops_and_says_what_it_is_now(stub):
    speaker = await opened_speaker(stub)
    await speaker.transact(wire.admit(wire.admission(1, 9, path="ab")))
    answer = await speaker.transact(wire.admit(wire.admission(2, 9, hit=4, path="ab")))
    assert answer.stop == kvpool_pb2.Stop(
        reason=kvpool_pb2.STOP_REASON_HIT_CHANGED, num_hit_tokens=8
    )
    assert len(answer.results) == 1
    assert not answer.results[0].admit.groups[0].num_blocks


async def test_the_last_transaction_is_answered_again_after_a_broken_stream(stub):
    speaker = await opened_speaker(stub)
    first = await speaker.transact(wire.admit(wire.admission(1, 9)))
    speaker.break_off()

    again = Speaker(stub, speaker.generation)
    assert await again.send(1, wire.admit(wire.admission(1, 9))) == first
    next_one = await again.send(2, wire.grow([1], [13]))
    assert list(next_one.results[0].grow.groups[0].block_ids) == [4]


@pytest.mark.parametrize("sequence", [0, 1, 4])
async def test_any_other_number_is_out_of_sequence(stub, sequence):
    speaker = await opened_speaker(stub)
    await speaker.transact(wire.admit(wire.admission(1, 4)))
    await speaker.transact(wire.grow([1], [8]))
    with pytest.raises(FailedPrecondition) as refused:
        await speaker.send(sequence)
    assert refused.value.error_reason == "OUT_OF_SEQUENCE"


async def test_the_first_transaction_of_a_generation_has_number_one(stub):
    speaker = await opened_speaker(stub)
    with pytest.raises(FailedPrecondition) as refused:
        await speaker.send(0)
    assert refused.value.error_reason == "OUT_OF_SEQUENCE"


async def test_opening_a_pool_again_fences_what_was_said_before(stub):
    old = await opened_speaker(stub)
    await old.transact(wire.admit(wire.admission(1, 9, path="ab")))
    new = await opened_speaker(stub)
    assert new.generation > old.generation
    with pytest.raises(FailedPrecondition) as refused:
        await old.transact(wire.grow([1], [13]))
    assert refused.value.error_reason == "STALE_GENERATION"
    answer = await new.transact(wire.lookup(1, 8, "ab"))
    assert list(answer.results[0].lookup.num_hit_tokens) == [0]
    assert answer.num_free_blocks == 9


async def test_the_newest_stream_takes_over_from_one_that_waits(stub):
    old = await opened_speaker(stub)
    await old.transact(wire.admit(wire.admission(1, 4)))
    waiting = asyncio.create_task(old.read())
    new = Speaker(stub, old.generation)
    await new.send(2, wire.grow([1], [8]))
    with pytest.raises(Aborted) as taken:
        await asyncio.wait_for(waiting, wire.SECONDS)
    assert taken.value.error_reason == "TAKEN_OVER"
    await new.send(3, wire.release(1))
    await new.end()


async def test_a_superseded_stream_is_refused_and_takes_nothing_from_the_current_one(stub):
    old = await opened_speaker(stub)
    current = await opened_speaker(stub)
    await current.transact(wire.admit(wire.admission(1, 4)))
    with pytest.raises(FailedPrecondition):
        await old.transact()
    assert (await current.transact(wire.grow([1], [8]))).num_free_blocks == 7


async def test_two_pools_are_spoken_for_by_two_streams(stub):
    a = await opened_speaker(stub, pool_id="a")
    b = await opened_speaker(stub, pool_id="b")
    await a.transact(wire.admit(wire.admission(1, 9)))
    await b.transact(wire.admit(wire.admission(1, 5)))
    assert (await a.transact()).num_free_blocks == 6
    assert (await b.transact()).num_free_blocks == 7


async def test_a_malformed_transaction_names_the_field_and_changes_nothing(stub):
    speaker = await opened_speaker(stub)
    await speaker.transact(wire.admit(wire.admission(1, 4)))
    with pytest.raises(InvalidArgument) as refused:
        await speaker.send(2, wire.release(1), wire.grow([1, 2], [8]))
    assert refused.value.field == "operations[1].grow.num_slots"

    again = Speaker(stub, speaker.generation)
    answer = await again.send(2, wire.grow([1], [8]))  # number 2 is unused, and request 1 exists
    assert list(answer.results[0].grow.groups[0].block_ids) == [2]


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (kvpool_pb2.Operation(), "operations[0]"),
        (
            kvpool_pb2.Operation(
                lookup=kvpool_pb2.Lookup(
                    requests=[1], max_hit_tokens=[4], num_new_hashes=[1], new_hashes=b"x" * 31
                )
            ),
            "operations[0].lookup.new_hashes",
        ),
        (
            kvpool_pb2.Operation(
                lookup=kvpool_pb2.Lookup(
                    requests=[1], max_hit_tokens=[4], num_new_hashes=[2], new_hashes=b"x" * 32
                )
            ),
            "operations[0].lookup.num_new_hashes",
        ),
        (
            wire.admit(kvpool_pb2.Admission(request=1, num_slots=4, new_hashes=b"x" * 33)),
            "operations[0].admit.admissions[0].new_hashes",
        ),
    ],
)
async def test_hashes_come_whole_and_as_many_as_counted(stub, operation, field):
    speaker = await opened_speaker(stub)
    with pytest.raises(InvalidArgument) as refused:
        await speaker.transact(operation)
    assert refused.value.field == field


async def test_an_unknown_pool_is_not_found(stub):
    with pytest.raises(NotFound) as refused:
        await Speaker(stub, 1, "elsewhere").transact()
    assert refused.value.error_reason == "POOL_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_blocks": 1_048_577}, "num_blocks"),
        ({"pool_id": ""}, "pool_id"),
        ({"groups": []}, "groups"),
        ({"groups": [common_pb2.KVCacheGroup(block_size=4)]}, "groups[0].attention_type"),
        (
            {
                "groups": [
                    common_pb2.KVCacheGroup(
                        attention_type=common_pb2.ATTENTION_TYPE_SLIDING_WINDOW,
                        block_size=4,
                        window=1,
                    )
                ]
            },
            "groups[0].window",
        ),
        (
            {
                "groups": [
                    common_pb2.KVCacheGroup(
                        attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=size
                    )
                    for size in (4, 6)
                ],
                "prefix_match_unit": 4,
            },
            "prefix_match_unit",
        ),
    ],
)
async def test_a_pool_of_a_shape_that_is_not_served_is_refused(stub, fields, field):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.OpenPool(wire.open_request(**fields))
    error = status.from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_a_scheduler_of_another_protocol_opens_no_pool(stub):
    speaker = await opened_speaker(stub)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.OpenPool(wire.open_request(release=common_pb2.Release(protocol=9, version="9")))
    error = status.from_rpc_error(refused.value)
    assert isinstance(error, FailedPrecondition)
    assert error.error_reason == "OTHER_PROTOCOL"
    assert "this kvpool has version" in error.message
    assert "the scheduler version 9 (protocol 9)" in error.message
    await speaker.transact(wire.lookup(1, 8, "ab"))  # the pool keeps its generation


async def test_no_more_pools_are_opened_than_the_process_keeps(stub):
    for number in range(MAX_POOLS):
        await stub.OpenPool(wire.open_request(str(number)))
    await stub.OpenPool(wire.open_request("0"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.OpenPool(wire.open_request("another"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_reset_is_refused_while_blocks_are_in_use(stub):
    speaker = await opened_speaker(stub)
    answer = await speaker.transact(wire.admit(wire.admission(1, 9, path="ab")), wire.reset())
    assert not answer.results[1].reset_prefix_cache.done
    answer = await speaker.transact(wire.release(1), wire.lookup(2, 8, "ab"))
    assert list(answer.results[1].lookup.num_hit_tokens) == [8]
    answer = await speaker.transact(wire.reset(), wire.lookup(2, 8, ""))
    assert answer.results[0].reset_prefix_cache.done
    assert list(answer.results[1].lookup.num_hit_tokens) == [0]


async def test_statistics_tell_occupancy_and_hits(stub):
    speaker = await opened_speaker(stub)
    await speaker.transact(wire.admit(wire.admission(1, 9, path="ab")))
    await speaker.transact(wire.admit(wire.admission(2, 9, hit=8, path="ab")))
    (stats,) = (await stub.GetStats(kvpool_pb2.GetStatsRequest())).pools
    assert stats == kvpool_pb2.PoolStats(
        pool_id="replica",
        generation=speaker.generation,
        num_usable_blocks=9,
        num_free_blocks=5,
        num_cached_hashes=2,
        num_requests=2,
        num_query_tokens=16,
        num_hit_tokens=8,
        num_transactions=2,
        num_common_prefix_blocks=[2],
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetStats(kvpool_pb2.GetStatsRequest(pool_id="elsewhere"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_spans_follow_the_step_and_the_request(stub, spans):
    step, request = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")
    speaker = await opened_speaker(stub, num_blocks=4)
    await speaker.transact(wire.admit(wire.admission(1, 4, path="a")))
    await speaker.transact(
        wire.release(1),
        wire.admit(
            wire.admission(2, 9, hit=4, path="ab", traceparent=request),
            wire.admission(3, 9, traceparent=request),
        ),
        traceparent=step,
    )
    transact, admitted = spans.get_finished_spans()
    assert transact.name == "kvpool.transact"
    assert f"{transact.parent.span_id:016x}" == "1" * 16
    assert transact.attributes["stepwell.num_operations"] == 2
    assert transact.attributes["stepwell.stop_reason"] == "no_blocks"
    assert admitted.name == "kvpool.admit", "the other did not fit, and is tried again"
    assert f"{admitted.parent.span_id:016x}" == "2" * 16
    assert admitted.attributes["stepwell.num_cached_tokens"] == 4
    assert admitted.attributes["stepwell.num_blocks"] == 3


async def opened_speaker(stub, **shape) -> Speaker:
    opened = await stub.OpenPool(wire.open_request(**shape))
    return Speaker(stub, opened.generation, shape.get("pool_id", "replica"))


async def test_a_map_of_the_blocks_delays_no_transaction(service, stub):
    """A map is made in a thread, from the pool's state at the time of the call."""
    speaker = await opened_speaker(stub, num_blocks=100_000)
    await speaker.transact(wire.admit(wire.admission(1, 9)))
    tracing = configure_tracing("kvpool", "", 1.0)
    servicer = KVPoolServicer(service[0].host, MemoryDirectory(), EventFeed(), tracing)
    request = kvpool_pb2.GetBlocksRequest(pool_id="replica", max_cells=4)
    asked = asyncio.create_task(servicer.GetBlocks(request, None))
    await asyncio.sleep(0)
    assert not asked.done()  # the event loop is free
    await speaker.transact(wire.release(1))
    assert (await asked).blocks.num_held == 3
    answer = await stub.GetBlocks(request)
    assert (answer.blocks.num_held, answer.blocks.num_blank) == (0, 99_999)


def test_every_refusal_of_the_pool_has_a_status_and_a_reason():
    refusals = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert len(refusals) >= 10
    assert len({kind.reason for kind in refusals}) == len(refusals)
    for kind in refusals:
        assert status.status_code(kind("why")) is not grpc.StatusCode.INTERNAL


async def test_groups_of_several_kinds_speak_of_null_blocks_as_zero(stub):
    groups = [
        common_pb2.KVCacheGroup(
            attention_type=kind,
            block_size=4,
            window=window,
            mamba_cache_mode=common_pb2.MAMBA_CACHE_MODE_ALIGN,
        )
        for kind, window in (
            (common_pb2.ATTENTION_TYPE_FULL, 0),
            (common_pb2.ATTENTION_TYPE_SLIDING_WINDOW, 6),
            (common_pb2.ATTENTION_TYPE_STATE_SPACE, 0),
        )
    ]
    speaker = await opened_speaker(stub, num_blocks=20, groups=groups)
    answer = await speaker.transact(wire.admit(wire.admission(1, 12, path="abc")))
    tables = [list(group.block_ids) for group in answer.results[0].admit.groups]
    assert tables == [[1, 2, 3], [4, 5, 6], [0, 0, 7]]
    grow = kvpool_pb2.Grow(requests=[1], num_computed_tokens=[12], num_slots=[13])
    answer = await speaker.transact(
        kvpool_pb2.Operation(begin_step=kvpool_pb2.BeginStep()),
        kvpool_pb2.Operation(grow=grow),
        wire.admit(wire.admission(2, 13, hit=12, path="abc")),
    )
    tables = [list(group.block_ids) for group in answer.results[2].admit.groups]
    assert tables == [[1, 2, 3, 11], [0, 5, 6, 12], [0, 0, 7, 13]]
    (stats,) = (await stub.GetStats(kvpool_pb2.GetStatsRequest())).pools
    assert list(stats.num_common_prefix_blocks) == [3, 0, 0]


async def test_a_pool_for_a_draft_head_drops_the_last_block_of_a_hit(stub):
    speaker = await opened_speaker(stub, drop_last_hit_block=True)
    await speaker.transact(wire.admit(wire.admission(1, 12, path="abc")))
    answer = await speaker.transact(wire.lookup(2, 12, "abc"))
    assert list(answer.results[0].lookup.num_hit_tokens) == [8]
