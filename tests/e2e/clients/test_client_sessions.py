"""Turns of a session continue with cached blocks of earlier turns, even if a service ends."""

import signal
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, connect, request
from tests.e2e.prompts import random_tokens
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.plain_http import async_http_client

CHUNKS = [random_tokens(7_000, 60), random_tokens(7_001, 9), random_tokens(7_002, 31)]
NUM_TOKENS = [20, 7, 25]


def expected(model: TinyModel, chunks: Sequence[list[int]], counts: Sequence[int]) -> list[int]:
    """The outputs of requests whose prompts contain all earlier prompts and outputs."""
    prompt: list[int] = []
    said: list[int] = []
    for chunk, count in zip(chunks, counts, strict=True):
        answer = greedy(model.model, [*prompt, *chunk], count)
        prompt += [*chunk, *answer]
        said += answer
    return said


class Session:
    """A session over gRPC."""

    def __init__(self, stub: gateway_pb2_grpc.InferenceStub) -> None:
        self.call = stub.GenerateSession()

    async def turn(
        self, chunk: list[int], count: int, on_tokens: Callable[[int], None] | None = None
    ) -> Answer:
        message = gateway_pb2.GenerateSessionRequest(turn=request(chunk, count))
        await self.call.write(message)
        answer = Answer()
        async for response in self.call:
            piece = response.piece
            answer.token_ids += piece.token_ids
            if on_tokens is not None:
                on_tokens(len(answer.token_ids))
            if piece.finish_reason:
                answer.finish_reason = piece.finish_reason
                answer.num_cached_tokens = piece.usage.num_cached_tokens
                break
        return answer

    async def end(self) -> None:
        """Ends the client's stream. The gateway must then end its stream without a message."""
        await self.call.done_writing()
        assert [response async for response in self.call] == []


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with async_http_client(base_url=stack.url) as client:
        yield client


async def test_three_turns_over_grpc_say_what_one_request_each_would(
    stack: Stack, tiny_model: TinyModel
) -> None:
    async with connect(stack.grpc) as stub:
        session = Session(stub)
        said: list[int] = []
        num_before = 0
        for chunk, count in zip(CHUNKS, NUM_TOKENS, strict=True):
            answer = await session.turn(chunk, count)
            assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
            if num_before:
                assert answer.num_cached_tokens == num_before - 1, "all but the last token"
            num_before += len(chunk) + count
            said += answer.token_ids
        await session.end()
    assert said == expected(tiny_model, CHUNKS, NUM_TOKENS)
    wait_for(lambda: stack.status()["num_free_blocks"] == stack.status()["num_usable_blocks"])


async def test_three_turns_over_http_are_completions_of_one_session(
    stack: Stack, tiny_model: TinyModel, client: httpx.AsyncClient
) -> None:
    session = (await client.post("/v1/sessions", json={})).raise_for_status().json()
    said: list[int] = []
    for number, (chunk, count) in enumerate(zip(CHUNKS, NUM_TOKENS, strict=True)):
        body = {
            "session": session["id"],
            "prompt": chunk,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        said += answer["choices"][0]["token_ids"]
        state = (await client.get(f"/v1/sessions/{session['id']}")).json()
        assert (state["status"], state["num_turns"], state["is_held"]) == ("idle", number + 1, True)
    assert said == expected(tiny_model, CHUNKS, NUM_TOKENS)
    assert state["num_tokens"] == sum(map(len, CHUNKS)) + sum(NUM_TOKENS)
    assert (await client.delete(f"/v1/sessions/{session['id']}")).json()["status"] == "ended"
    assert (await client.get(f"/v1/sessions/{session['id']}")).status_code == 404
    wait_for(lambda: stack.status()["num_free_blocks"] == stack.status()["num_usable_blocks"])


async def test_a_client_that_goes_away_leaves_nothing(stack: Stack) -> None:
    async with connect(stack.grpc) as stub:
        session = Session(stub)
        await session.turn(CHUNKS[0], 5)
        assert stack.status()["num_free_blocks"] < stack.status()["num_usable_blocks"]
        session.call.cancel()
    wait_for(lambda: stack.status()["num_free_blocks"] == stack.status()["num_usable_blocks"])


@pytest.mark.parametrize(
    ("service", "signum"),
    [
        *((service, signal.SIGKILL) for service in ("worker", "kvpool", "scheduler")),
        ("scheduler", signal.SIGSTOP),
    ],
)
async def test_a_session_goes_on_when_a_service_is(
    service: str, signum: signal.Signals, stack: Stack, tiny_model: TinyModel
) -> None:
    """The service gets the signal between two turns, and again during a turn. Only the scheduler
    gets SIGSTOP, because stopped workers and pools are killed after some time.
    """
    chunks, counts, was_hit = [*CHUNKS, CHUNKS[1]], [20, 30, 150, 20], False

    def on_tokens(num_tokens: int) -> None:
        nonlocal was_hit
        if num_tokens >= 30 and not was_hit:
            was_hit = True
            stack.hit(service, signum)

    async with connect(stack.grpc) as stub:
        session = Session(stub)
        answers = [await session.turn(chunks[0], counts[0])]
        pid = stack.pids()[service]
        stack.hit(service, signum)
        answers.append(await session.turn(chunks[1], counts[1]))
        stack.wait_until_back(service, pid)
        pid = stack.pids()[service]
        answers.append(await session.turn(chunks[2], counts[2], on_tokens))
        assert was_hit
        stack.wait_until_back(service, pid)
        answers.append(await session.turn(chunks[3], counts[3]))
        await session.end()
    said = [token for answer in answers for token in answer.token_ids]
    assert said == expected(tiny_model, chunks, counts)
    wait_for(lambda: stack.status()["num_free_blocks"] == stack.status()["num_usable_blocks"])
