"""Client sessions (requests with input in turns) over HTTP and gRPC: turns, refusals and ends."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import StepwellError
from services.common.keys.api_keys import TenantRecord
from services.common.pool.block_hash import unpack_token_ids
from services.common.rpc.status import from_rpc_error
from services.gateway.options.sessions import Sessions
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import FileKeyring, post
from tests.gateway.serving import Serving, serving, until

SHORT_SECONDS = 0.4
SECONDS = 30.0


async def open_session(served: Serving) -> str:
    answer = await served.http.post("/v1/sessions", json={})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def turn(served: Serving, session: str, prompt: str, **fields: Any) -> Any:
    body = {"prompt": prompt, "session": session, "max_tokens": 8, "seed": 1} | fields
    return await served.http.post("/v1/completions", json=body)


async def error_of(answer: Any) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def prompts(served: Serving) -> list[list[int]]:
    return [unpack_token_ids(add.prompt_token_ids) for add in served.scheduler.adds]


def num_sessions(served: Serving) -> int:
    options = served.gateway.parts.options
    return sum(len(option.sessions) for option in options if isinstance(option, Sessions))


async def test_a_turn_has_all_that_was_said_before_in_its_prompt(served: Serving) -> None:
    session = await open_session(served)
    first = (await turn(served, session, "hello", return_token_ids=True)).json()
    second = (await turn(served, session, " world")).json()
    begun, whole = prompts(served)
    assert whole == [*begun, *first["choices"][0]["token_ids"], *served.tokens(" world")]
    assert served.scheduler.adds[1].resumable
    assert second["usage"]["prompt_tokens"] == len(whole)


async def test_a_token_that_ended_a_turn_is_no_part_of_the_next_prompt(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the world")
    session = await open_session(served)
    answer = (await turn(served, session, "hi", max_tokens=50)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    await turn(served, session, "!", max_tokens=1)
    begun, whole = prompts(served)
    assert whole == [*begun, *served.tokens("the world"), *served.tokens("!")]


async def test_a_stop_string_ends_a_turn_and_its_tokens_stay(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the hello world and more")
    session = await open_session(served)
    answer = (await turn(served, session, "hi", stop=["lo w"], max_tokens=50)).json()
    assert answer["choices"][0]["text"] == "the hel"
    await turn(served, session, "!", max_tokens=1)
    begun, whole = prompts(served)
    kept = whole[len(begun) : -len(served.tokens("!"))]
    assert kept == served.scheduler.answer[: len(kept)]
    assert 0 < len(kept) < len(served.scheduler.answer)


async def test_a_turn_whose_client_goes_away_leaves_the_session_as_it_was(served: Serving) -> None:
    session = await open_session(served)
    await turn(served, session, "hello")
    before = (await served.http.get(f"/v1/sessions/{session}")).json()
    served.scheduler.permits = 0
    asking = asyncio.create_task(turn(served, session, " world"))
    await until(lambda: len(served.scheduler.adds) == 2)
    assert await error_of(await turn(served, session, "!")) == (409, "session_in_turn", "session")
    asking.cancel()
    async with asyncio.timeout(SECONDS):
        path = f"/v1/sessions/{session}"
        while (await served.http.get(path)).json() != before:  # noqa: ASYNC110 - a server's state
            await asyncio.sleep(0.01)
    served.scheduler.run_freely()
    assert (await turn(served, session, " world")).status_code == 200
    assert prompts(served)[1] == prompts(served)[2]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n", {"n": 2}),
        ("best_of", {"best_of": 3}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("echo", {"echo": True}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
    ],
)
async def test_what_a_session_cannot_do_is_refused_by_name(
    served: Serving, field: str, fields: dict[str, Any]
) -> None:
    session = await open_session(served)
    asked = {"prompt": "hello", "session": session} | fields
    answer = await served.http.post("/v1/completions", json=asked)
    status, _, param = await error_of(answer)
    assert (status, param) == (400, field), answer.text
    assert (await turn(served, session, "hello")).status_code == 200


async def test_a_session_that_is_not_there(served: Serving) -> None:
    answer = await turn(served, "sess-0", "hello")
    assert await error_of(answer) == (404, "session_not_found", "session")
    assert (await served.http.delete("/v1/sessions/sess-0")).status_code == 404


async def test_an_idle_session_ends_with_a_reason(model: Path) -> None:
    settings = {"client_session_idle_seconds": SHORT_SECONDS}
    async with serving(model, FakeScheduler(), **settings) as served:
        session = await open_session(served)
        await asyncio.sleep(2 * SHORT_SECONDS)
        answer = await turn(served, session, "hello")
        assert await error_of(answer) == (404, "session_expired", "session")
        assert "no turn of it began for 0.4 s" in answer.text
        metrics = (await served.http.get("/metrics")).text
        assert 'stepwell_gateway_sessions_expired_total{model_name="tiny"} 1.0' in metrics

        call = served.stub.GenerateSession()
        await call.write(turn_message("hello"))
        while not (await call.read()).piece.finish_reason:
            pass
        error = await status_of(call)
        assert error.error_reason == "SESSION_EXPIRED"


def turn_message(text: str = "", **fields: Any) -> gateway_pb2.GenerateSessionRequest:
    given = {"text": text, "sampling": {"max_tokens": 8, "seed": 1}} | fields
    return gateway_pb2.GenerateSessionRequest(turn=gateway_pb2.GenerateRequest(**given))


async def status_of(call: Any) -> StepwellError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    return from_rpc_error(raised.value)


async def test_a_session_over_grpc_is_a_stream_of_turns(served: Serving) -> None:
    call = served.stub.GenerateSession()
    await call.write(turn_message("hello"))
    await call.write(turn_message(" world"))
    await call.done_writing()
    texts = ["", ""]
    reasons = []
    async for response in call:
        texts[response.turn] += response.piece.text
        if response.piece.finish_reason:
            reasons.append((response.turn, response.piece.finish_reason))
    length = common_pb2.FINISH_REASON_LENGTH
    assert reasons == [(0, length), (1, length)]
    session = await open_session(served)
    over_http = [
        (await turn(served, session, text)).json()["choices"][0]["text"]
        for text in ("hello", " world")
    ]
    assert texts == over_http
    await until(lambda: num_sessions(served) == 1)


async def test_a_turn_whose_client_stops_reading_gives_its_tenants_slot_back(
    model: Path, tmp_path: Path
) -> None:
    length = 400_000
    scheduler = FakeScheduler(max_model_len=length, max_request_tokens=length, tokens_per_step=500)
    ring = FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", max_concurrent_requests=1))
    settings = {"api_key_file": ring.path, "reader_timeout_seconds": 0.5}
    async with serving(model, scheduler, **settings) as served:
        call = served.stub.GenerateSession(metadata=(("authorization", f"Bearer {key}"),))
        await call.write(turn_message("hello", sampling={"max_tokens": 300_000, "logprobs": 10}))
        await call.read()
        await until(lambda: not served.gateway.gate.inside)
        assert (await post(served, key)).status_code == 200
        call.cancel()


async def test_an_error_of_a_turn_ends_the_call(served: Serving) -> None:
    for message, reason in (
        (turn_message("hello", n=2), "INVALID_ARGUMENT"),
        (turn_message("hello", model="other"), "MODEL_NOT_FOUND"),
        (turn_message(), "INVALID_ARGUMENT"),
    ):
        call = served.stub.GenerateSession()
        await call.write(message)
        error = await status_of(call)
        assert error.error_reason == reason
    assert num_sessions(served) == 0


async def test_a_chat_can_only_begin_a_session(served: Serving) -> None:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    sampling = {"max_tokens": 2}
    message = gateway_pb2.GenerateSessionRequest(
        turn=gateway_pb2.GenerateRequest(chat=chat, sampling=sampling)
    )
    call = served.stub.GenerateSession()
    await call.write(message)
    while not (await call.read()).piece.finish_reason:
        pass
    await call.write(message)
    error = await status_of(call)
    assert error.field == "chat"


async def test_a_gateway_that_stops_ends_idle_sessions_at_once(model: Path) -> None:
    async with serving(model, FakeScheduler(), drain_seconds=30.0) as served:
        call = served.stub.GenerateSession()
        await call.write(turn_message("hello"))
        while not (await call.read()).piece.finish_reason:
            pass
        async with asyncio.timeout(10):
            await served.gateway.drain()
            error = await status_of(call)
        assert "shutting down" in error.message
