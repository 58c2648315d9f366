"""The sessions (streams) of gateways with a scheduler over gRPC: requests, tokens, and
disconnections, after which all blocks of the session's requests are free.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.pool.block_hash import pack_token_ids
from services.common.rpc.channel import open_channel
from services.scheduler.adapters.gateways import servicer
from tests.scheduler.fake_worker import BLOCK_SIZE, EOS, FakeWorker
from tests.scheduler.paged_model import VOCAB_SIZE, continuation
from tests.scheduler.serving_replica import (
    Gateway,
    Heard,
    Replica,
    add_request,
    gateway_of,
    sampling,
    serving_replica,
)
from tests.scheduler.story import prompt


@pytest.fixture(params=[False, True], ids=["one step in flight", "two steps in flight"])
async def replica(request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    async with serving_replica(async_scheduling=request.param) as replica:
        yield replica


async def test_a_session_is_told_first_what_is_served(gateway: Gateway) -> None:
    opened = gateway.opened
    assert opened is not None
    assert (opened.model_name, opened.vocab_size) == ("paged", VOCAB_SIZE)
    assert (opened.max_model_len, opened.max_request_tokens) == (200, 200)
    assert (opened.block_size, opened.fingerprint) == (BLOCK_SIZE, b"f" * 32)
    assert list(opened.eos_token_ids) == [EOS]
    assert not opened.priority_scheduling
    assert opened.incarnation


async def test_tokens_come_back_by_handle(replica: Replica, gateway: Gateway) -> None:
    await gateway.add(7, prompt(9))
    await gateway.add(3, prompt(5, 500), sampling=sampling(3))
    await gateway.finish(7, 3)
    assert gateway.heard[7].tokens == continuation(prompt(9), 8)
    assert gateway.heard[3].tokens == continuation(prompt(5, 500), 3)
    finished = gateway.heard[7].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert not finished.HasField("stop_token_id")
    await replica.until_idle()


async def test_a_prefix_that_is_cached_is_said_at_admission(gateway: Gateway) -> None:
    await gateway.add(1, prompt(10))
    await gateway.finish(1)
    await gateway.add(2, prompt(10))
    await gateway.finish(2)
    assert gateway.heard[1].num_cached_tokens == 0
    assert gateway.heard[2].num_cached_tokens == 8
    assert gateway.heard[1].tokens == gateway.heard[2].tokens


async def test_a_grammar_that_a_worker_refuses_is_the_clients_error(
    replica: Replica, gateway: Gateway
) -> None:
    regex = common_pb2.StructuredOutputs(kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text="(")
    await gateway.add(1, prompt(9), sampling=sampling(structured_outputs=regex))
    await gateway.finish(1)
    heard = gateway.heard[1]
    assert heard.finished is not None
    assert heard.finished.reason == common_pb2.FINISH_REASON_GRAMMAR_ERROR
    assert heard.finished.message == "unclosed group"
    assert heard.tokens == []
    await replica.until_idle()


async def test_a_stop_token_is_named(gateway: Gateway) -> None:
    said = continuation(prompt(9), 8)
    await gateway.add(1, prompt(9), sampling=sampling(stop_token_ids=[said[2]]))
    await gateway.finish(1)
    finished = gateway.heard[1].finished
    assert finished is not None
    assert (finished.reason, finished.stop_token_id) == (common_pb2.FINISH_REASON_STOP, said[2])
    assert gateway.heard[1].tokens == said[:3]


async def test_a_request_goes_on_after_what_was_delivered(gateway: Gateway) -> None:
    said = continuation(prompt(9), 8)
    await gateway.add(1, prompt(9), output_token_ids=pack_token_ids(said[:5]))
    await gateway.finish(1)
    assert gateway.heard[1].tokens == said[5:]


async def test_a_handle_is_free_again_when_its_request_has_ended(gateway: Gateway) -> None:
    for _ in range(3):
        await gateway.add(1, prompt(5), sampling=sampling(2))
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(5), 2)


async def test_of_several_requests_in_a_message_each_is_served_or_refused(gateway: Gateway) -> None:
    prompts = {1: prompt(5), 2: [5, VOCAB_SIZE], 3: prompt(7)}
    requests = [add_request(handle, tokens) for handle, tokens in prompts.items()]
    gateway.heard.update({handle: Heard() for handle in prompts})
    await gateway.say(adds=scheduler_pb2.AddRequests(requests=requests))
    for handle in prompts:
        await gateway.finish(handle)
    assert gateway.heard[2].rejected is not None
    for handle in (1, 3):
        tokens = gateway.heard[handle].tokens
        assert tokens
        assert tokens == continuation(prompts[handle], len(tokens))


WRONG_REQUESTS = {
    "handle": {"add": scheduler_pb2.AddRequest(handle=1)},
    "stopped_handles": {"abort": scheduler_pb2.AbortRequests(handles=[1], stopped_handles=[2])},
    "number": {"number": 2, "keep": scheduler_pb2.KeepTrace()},
}


@pytest.mark.parametrize("field", WRONG_REQUESTS)
async def test_a_wrong_message_ends_its_session_with_one_line_and_no_other_one(
    field: str, replica: Replica, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    replica.worker.going.clear()
    await gateway.add(1, prompt(5))
    async with gateway_of(replica) as other:
        await other.add(1, prompt(9))
        await gateway.until(lambda: gateway.loads[-1:] != [])
        await gateway.say(**WRONG_REQUESTS[field])
        await gateway.until_ended()
        assert isinstance(gateway.error, InvalidArgument)
        assert gateway.error.field == field
        replica.worker.going.set()
        await other.finish(1)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1


async def test_a_session_says_which_messages_it_has_taken(gateway: Gateway) -> None:
    await gateway.add(1, prompt(5), sampling=sampling(2))
    await gateway.finish(1)
    assert gateway.taken == (2, 1)


async def test_a_refusal_names_the_field_and_nothing_is_held(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, [5, VOCAB_SIZE])
    await gateway.finish(1)
    rejected = gateway.heard[1].rejected
    assert rejected is not None
    assert (rejected.code, rejected.field) == (3, "prompt_token_ids")
    assert rejected.reason == "INVALID_ARGUMENT"
    assert str(VOCAB_SIZE) in rejected.message
    assert (await replica.stats()).num_finished == 0
    await gateway.add(1, prompt(5))
    await gateway.finish(1)


async def test_a_handle_is_aborted_and_leaves_the_others(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(180))
    await gateway.add(2, prompt(9), sampling=sampling(20))
    await gateway.until_tokens(1, 2)
    await gateway.abort(1, 99)
    await gateway.finish(1, 2)
    finished = gateway.heard[1].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_ABORT
    assert gateway.heard[1].tokens == continuation(prompt(9), len(gateway.heard[1].tokens))
    assert gateway.heard[2].tokens == continuation(prompt(9), 20)
    await replica.until_idle()


async def test_abort_by_name_reaches_requests_of_any_session(
    replica: Replica, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    replica.worker.going.clear()
    await gateway.add(1, prompt(9), request_id="mine")
    async with gateway_of(replica) as other:
        await other.add(1, prompt(9), request_id="theirs")
        await replica.until(lambda stats: stats.num_running + stats.num_waiting == 2)
        answer = await replica.admin.Abort(
            scheduler_pb2.AbortRequest(request_ids=["mine", "theirs", "unknown"])
        )
        assert answer.num_aborted == 2
        logged = [vars(one) for one in caplog.records if "operator aborts" in one.getMessage()]
        assert [one["request_id"] for one in logged] == ["mine", "theirs"]
        replica.worker.going.set()
        await gateway.finish(1)
        await other.finish(1)
    again = await replica.admin.Abort(scheduler_pb2.AbortRequest(request_ids=["mine"]))
    assert again.num_aborted == 0
    await replica.until_idle()


@pytest.mark.parametrize("ending", ["cancelled", "half closed"])
async def test_the_end_of_a_session_ends_its_requests(replica: Replica, ending: str) -> None:
    gateway = Gateway(replica.stub)
    await gateway.open()
    for handle in range(12):
        await gateway.add(handle, prompt(9, 50 * handle), sampling=sampling(180))
    await gateway.until_tokens(0, 2)
    if ending == "cancelled":
        await gateway.close()
    else:
        await gateway.call.done_writing()
        await gateway.until_ended()
        assert gateway.error is None
    await replica.until_idle()
    stats = await replica.stats()
    assert (stats.num_finished, stats.num_sessions) == (12, 0)


async def test_a_gateway_whose_connection_breaks_leaves_nothing(replica: Replica) -> None:
    async with open_channel(replica.address) as channel:
        gateway = Gateway(scheduler_pb2_grpc.SchedulerStub(channel))
        await gateway.open()
        await gateway.add(1, prompt(9), sampling=sampling(180))
        await gateway.until_tokens(1, 1)
    await replica.until_idle()
    await gateway.until_ended()


async def test_a_session_begins_with_open_and_opens_once(replica: Replica) -> None:
    hasty = Gateway(replica.stub)
    await hasty.add(1, prompt(5))
    await hasty.until_ended()
    assert isinstance(hasty.error, InvalidArgument)
    assert hasty.error.field == "open"
    twice = Gateway(replica.stub)
    await twice.open()
    await twice.say(open=scheduler_pb2.OpenSession())
    await twice.until_ended()
    assert isinstance(twice.error, InvalidArgument)


@pytest.mark.parametrize("connect", [open_channel, grpc.aio.insecure_channel])
async def test_a_stream_on_which_nothing_arrives_ends(
    replica: Replica, connect: Callable[[str], grpc.aio.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the stream would stay open for ever, and delay the end of the process."""
    monkeypatch.setattr(servicer, "OPEN_SECONDS", 0.1)
    async with connect(replica.address) as channel:
        silent = Gateway(scheduler_pb2_grpc.SchedulerStub(channel))
        await silent.until_ended()
        assert isinstance(silent.error, InvalidArgument)
        assert silent.error.field == "open"
        assert "did not arrive within 0.1 s" in silent.error.message
        slow = Gateway(scheduler_pb2_grpc.SchedulerStub(channel))
        await slow.open()
        await asyncio.sleep(0.2)
        await slow.add(1, prompt(5))
        await slow.finish(1)
        await slow.close()


async def test_a_gateway_of_another_protocol_is_refused_with_both_versions(
    replica: Replica, gateway: Gateway
) -> None:
    newer = Gateway(replica.stub)
    await newer.say(
        open=scheduler_pb2.OpenSession(
            gateway_id="newer", release=common_pb2.Release(protocol=9, version="9.0.0")
        )
    )
    await newer.until_ended()
    assert isinstance(newer.error, FailedPrecondition)
    assert newer.error.error_reason == "OTHER_PROTOCOL"
    assert "the gateway version 9.0.0 (protocol 9)" in newer.error.message
    assert "this scheduler has version" in newer.error.message
    assert newer.opened is None
    await gateway.add(1, prompt(5))
    await gateway.finish(1)


async def test_broken_logits_end_a_request_with_an_error(
    replica: Replica, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    replica.worker.nan_rows = frozenset({0})
    await gateway.add(1, prompt(5), request_id="mine", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    await gateway.finish(1)
    finished = gateway.heard[1].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_NAN_IN_LOGITS
    assert finished.message == "the model computed NaN in the logits, so no token could be sampled"
    assert gateway.heard[1].tokens == []
    (logged,) = [vars(one) for one in caplog.records if "NaN in its logits" in one.getMessage()]
    assert (logged["request_id"], logged["trace_id"]) == ("mine", "ab" * 16)


async def test_a_token_that_does_not_conform_ends_its_request_whose_name_is_logged(
    replica: Replica, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replica.worker.refused_rows = frozenset({0})
    await gateway.add(1, prompt(5), request_id="mine")
    await gateway.finish(1)
    finished = gateway.heard[1].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_NO_CONFORMING_TOKEN
    assert gateway.heard[1].tokens == []
    (logged,) = [vars(one) for one in caplog.records if finished.message in one.getMessage()]
    assert (logged["request_id"], logged["levelname"]) == ("mine", "INFO")
    replica.worker.refused_rows = frozenset()
    await replica.until_idle()


async def test_a_prompt_that_is_hashed_in_a_thread_is_found_like_any_other() -> None:
    worker = FakeWorker(num_blocks=1500, max_model_len=4000, max_num_batched_tokens=3000)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(2500), sampling=sampling(2))
        await gateway.finish(1)
        await gateway.add(2, prompt(2500), sampling=sampling(2))
        await gateway.finish(2)
        assert gateway.heard[2].num_cached_tokens == 2496


async def test_more_requests_than_places_all_end_with_their_tokens(gateway: Gateway) -> None:
    wanted = {handle: prompt(3 + handle % 7, 20 * handle) for handle in range(40)}
    for handle, token_ids in wanted.items():
        await gateway.add(handle, token_ids, sampling=sampling(10))
    await gateway.finish(*wanted)
    for handle, token_ids in wanted.items():
        assert gateway.heard[handle].tokens == continuation(token_ids, 10)
