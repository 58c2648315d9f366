"""What takes long is computed in threads, before a request is added to the engine."""

import asyncio
import itertools
import operator

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.common.pool.ids import RequestKey
from services.common.replica.queue_state import QueueState
from services.common.request.adapter import Adapter
from services.common.request.structured_outputs import StructuredOutputs
from services.scheduler.adapters.gateways.request_intake import RequestIntake
from services.scheduler.adapters.gateways.resumable_sessions import ResumableSessions
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.gateways.submitter import HASH_INLINE_TOKENS, RequestSubmitter
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.adapters.workers.grammar_preparation import GrammarPreparation
from services.scheduler.core.request import Request
from tests.scheduler.engine_bench import BLOCK_SIZE, Bench
from tests.scheduler.serving_replica import add_request

HIDDEN_SIZE = 8


class NoWorkers:
    """Workers that compile no grammar and load no adapter."""

    def has_grammar(self, _wanted: StructuredOutputs) -> bool:
        raise NotImplementedError

    async def prepare_grammar(self, _wanted: StructuredOutputs) -> None:
        raise NotImplementedError

    async def load_adapter(self, _adapter: Adapter, _kept: object) -> None:
        raise NotImplementedError


def make_submitter(max_model_len: int = 120, num_blocks: int = 50) -> RequestSubmitter:
    bench = Bench(max_model_len=max_model_len, num_blocks=num_blocks)
    engine, sessions, workers = bench.engine, Sessions(), NoWorkers()
    config, queue = engine.scheduler.config, QueueState(0, 100, 0.0)
    adapters = AdapterLoader(workers, 0, lambda: engine.unfinished, lambda _request, _why: None)
    return RequestSubmitter(
        engine,
        RequestIntake(
            config, 100, HIDDEN_SIZE, max_model_len, lambda: queue, itertools.count(1).__next__
        ),
        sessions,
        ResumableSessions(engine, sessions, adapters, 1),
        GrammarPreparation(workers, adapters, engine.changes.grammar_compiled),
    )


def embedded(handle: int, data: bytes, salt: str = "") -> scheduler_pb2.AddRequest:
    return scheduler_pb2.AddRequest(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_embeds=common_pb2.PromptEmbeds(
            num_tokens=len(data) // (2 * HIDDEN_SIZE),
            dtype=common_pb2.EMBEDS_DTYPE_BFLOAT16,
            data=data,
        ),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=5),
        cache_salt=salt,
    )


async def test_embeddings_are_hashed_without_delaying_steps() -> None:
    submitter = make_submitter()
    session = submitter.sessions.open_call("gateway")
    submitting = asyncio.create_task(submitter.submit(session, embedded(1, bytes(640))))
    await asyncio.sleep(0)
    assert not submitting.done()
    assert not submitter.engine.changes.arrivals
    await submitting
    assert [request.request_id for request in submitter.engine.changes.arrivals] == ["request-1"]


async def test_only_equal_embeddings_share_blocks() -> None:
    submitter = make_submitter()
    session = submitter.sessions.open_call("gateway")
    one, other = bytes(640), bytes(639) + b"1"
    for handle, (data, salt) in enumerate(((one, ""), (one, ""), (other, ""), (one, "salt"))):
        await submitter.submit(session, embedded(handle, data, salt))
    plain = Request(
        "plain", RequestKey(9), [0] * 40, 40, submitter.engine.changes.arrivals[0].sampling
    )
    hashes = []
    for request in (*submitter.engine.changes.arrivals, plain):
        request.hash_full_blocks(b"root", BLOCK_SIZE)
        hashes.append(request.block_hashes[0])
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


async def test_the_answers_of_a_request_share_the_memory_of_their_embeddings() -> None:
    submitter = make_submitter()
    session = submitter.sessions.open_call("gateway")
    for handle, data in enumerate((bytes(640), bytes(640), bytes(656))):
        await submitter.submit(session, embedded(handle, data))
    one, same, longer = (request.prompt_embeds for request in submitter.engine.changes.arrivals)
    assert one is same
    assert longer is not None
    assert longer.num_tokens == 41


async def test_the_answers_of_a_long_prompt_are_hashed_once() -> None:
    num_tokens = HASH_INLINE_TOKENS + BLOCK_SIZE
    submitter = make_submitter(max_model_len=2 * num_tokens, num_blocks=num_tokens)
    session = submitter.sessions.open_call("gateway")
    prompt, other = [5] * num_tokens, [5] * (num_tokens - 1) + [6]
    for handle, (tokens, salt) in enumerate(
        ((prompt, ""), (prompt, ""), (prompt, "salt"), (other, ""), (prompt, ""))
    ):
        message = add_request(handle, tokens, cache_salt=salt)
        await submitter.submit(session, message)
    requests = submitter.engine.changes.arrivals
    for request in requests:
        found, request.block_hashes = request.block_hashes, []
        request.hash_full_blocks(submitter.intake.config.fingerprint, BLOCK_SIZE)
        assert found == request.block_hashes
        request.block_hashes = found
    first, second = (request.block_hashes for request in requests[:2])
    assert all(map(operator.is_, first, second))
    assert first is not second


async def test_a_request_that_is_hashed_when_a_drain_begins_is_refused() -> None:
    """An open client's session would otherwise stay at the drained replica."""
    submitter = make_submitter()
    session = submitter.sessions.open_call("gateway")
    message = embedded(1, bytes(640))
    message.resumable = True
    submitting = asyncio.create_task(submitter.submit(session, message))
    await asyncio.sleep(0)
    submitter.refuse_new()
    with pytest.raises(Unavailable) as caught:
        await submitting
    assert caught.value.error_reason == "DRAINING"
    assert not submitter.engine.changes.arrivals
    assert not session.requests
