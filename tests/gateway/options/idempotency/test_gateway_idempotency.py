"""Requests with the header Idempotency-Key, at one gateway."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from services.gateway.options.idempotency import Idempotency
from services.gateway.options.idempotency.core.counts import KeyCounts
from tests.gateway.fake_scheduler import FULL, FakeScheduler, formula
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import BODY, PROMPT, Stream, expected

KEY = {"Idempotency-Key": "8e03978e-40d5-43e8-bc93-6894a57f9324"}
METADATA = (("idempotency-key", "k"),)
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 3}


async def metric(served: Serving, name: str) -> float:
    text = (await served.http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def counts_of(served: Serving) -> KeyCounts:
    [option] = [one for one in served.gateway.parts.options if isinstance(one, Idempotency)]
    return option.keyed_requests.counts


async def cut_after(served: Serving, num_tokens: int, body: dict | None = None) -> None:
    """Runs a client that reads `num_tokens` tokens of a stream and then disconnects."""
    served.scheduler.allow(num_tokens)
    stream = Stream(served, body, KEY)
    await until(lambda: len(stream.token_ids) == num_tokens)
    stream.task.cancel()
    with suppress(asyncio.CancelledError):
        await stream.task


async def whole(served: Serving, path: str, body: dict, **headers: str) -> dict[str, Any]:
    response = await served.http.post(path, json=body, headers=KEY | headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_a_client_that_was_cut_off_gets_the_whole_answer(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0)) as served:
        scheduler = served.scheduler
        await cut_after(served, 3)
        scheduler.allow(2)
        again = Stream(served, headers=KEY)
        await until(lambda: again.token_ids == expected(5))
        scheduler.run_freely()
        await again.task
        assert again.token_ids == expected(30)
        assert again.finish_reason == "length"
        assert len(scheduler.adds) == 1
        assert scheduler.aborts == []
        at_once = await whole(served, "/v1/completions", BODY | {"stream": False})
        assert at_once["choices"][0]["token_ids"] == expected(30)
        assert at_once["id"] == scheduler.adds[0].request_id
        assert at_once["usage"]["completion_tokens"] == 30
        assert len(scheduler.adds) == 1
        assert await metric(served, "stepwell_idempotent_answers") == 1.0


async def test_without_a_key_a_client_that_goes_away_ends_its_request(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0)) as served:
        stream = Stream(served)
        await until(lambda: served.scheduler.num_running == 1)
        stream.task.cancel()
        await until(lambda: served.scheduler.num_running == 0)


async def test_an_answer_that_no_client_reads_stops_and_goes_on_for_the_next(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake, idempotency_linger_seconds=0.05) as served:
        await cut_after(served, 3, {"seed": None})
        await until(lambda: fake.num_running == 0)
        again = Stream(served, {"seed": None}, KEY)
        await until(lambda: fake.num_running == 1)
        fake.run_freely()
        await again.task
        first, second = fake.adds
        seed = first.sampling.seed
        assert again.token_ids == [formula(PROMPT, seed, position) for position in range(30)]
        assert second.sampling.seed == seed
        assert second.request_id == first.request_id
        assert len(second.output_token_ids) == 4 * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 3}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 5, "logprobs": 1}),
        ("/v1/completions", {"prompt": "one", "max_tokens": 5, "echo": True, "logprobs": 1}),
    ],
)
async def test_repeated_answers_are_equal_in_all_they_say(
    model: Path, path: str, body: dict
) -> None:
    async with serving(model, FakeScheduler()) as served:
        first = await whole(served, path, body | {"seed": None})
        second = await whole(served, path, body | {"seed": None})
        assert second == first
        streamed = body | {"seed": None, "stream": True, "stream_options": {"include_usage": True}}
        one, two = [
            (await served.http.post(path, json=streamed, headers=KEY)).text for _ in range(2)
        ]
        events = [json.loads(line[6:]) for line in two.splitlines() if line.startswith("data: {")]
        assert events[-1]["usage"] == first["usage"]
        assert {(event["id"], event["created"]) for event in events} == {
            (first["id"], first["created"])
        }
        texts = dict.fromkeys(range(len(first["choices"])), "")
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                    "content", ""
                )
        assert list(texts.values()) == [
            choice.get("text") or choice["message"]["content"] for choice in first["choices"]
        ]
        assert one == two
        assert len(served.scheduler.adds) == len(first["choices"])


async def test_another_request_under_the_key_is_refused(served: Serving) -> None:
    await whole(served, "/v1/completions", {"prompt": "a", "max_tokens": 2})
    for path, body in (
        ("/v1/completions", {"prompt": "b", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
        ("/v1/chat/completions", CHAT),
    ):
        refused = await served.http.post(path, json=body, headers=KEY)
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["code"] == "idempotency_key_reused"
        assert error["param"] == "Idempotency-Key"
        assert error["type"] == "invalid_request_error"
    assert len(served.scheduler.adds) == 1


async def test_a_key_may_stand_in_quotes(served: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    first = await whole(served, "/v1/completions", body, **{"Idempotency-Key": '"k"'})
    second = await whole(served, "/v1/completions", body, **{"Idempotency-Key": "k"})
    assert second == first


async def test_what_is_no_key_is_refused_before_anything_is_sent(served: Serving) -> None:
    for value in ("", "x" * 256):
        headers = {"Idempotency-Key": value}
        refused = await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "Idempotency-Key"
    assert served.scheduler.adds == []


async def test_a_refusal_is_not_remembered(served: Serving) -> None:
    served.scheduler.rejection = FULL
    body = {"prompt": "a", "max_tokens": 2}
    refused = await served.http.post("/v1/completions", json=body, headers=KEY)
    assert refused.status_code == 503
    assert await metric(served, "stepwell_idempotent_answers") == 0.0
    served.scheduler.rejection = None
    await whole(served, "/v1/completions", body)
    assert len(served.scheduler.adds) == 2


async def test_where_queues_are_full_an_answer_that_is_there_is_given(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake) as served:
        await cut_after(served, 3)
        fake.set_queue(num_waiting=1, max_num_waiting=1)
        body = {"prompt": "other", "max_tokens": 2}
        (replica,) = served.gateway.membership.replicas
        await until(lambda: replica.queue_refusal(None) is not None)
        assert (await served.http.post("/v1/completions", json=body)).status_code == 503
        again = Stream(served, headers=KEY)
        await until(lambda: again.token_ids == expected(3))
        fake.run_freely()
        await again.task
        assert again.token_ids == expected(30)
        new = {"Idempotency-Key": "another"}
        assert (
            await served.http.post("/v1/completions", json=body, headers=new)
        ).status_code == 503


async def test_the_openai_sdk_meets_its_answer_when_it_tries_again(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake) as served:
        async with served.openai(max_retries=5, timeout=1.0) as client:
            # The first attempts time out. The SDK sends the request again with the same key.
            asked = asyncio.create_task(
                client.completions.create(
                    model="tiny", prompt="hello", max_tokens=8, extra_headers=KEY
                )
            )
            await until(lambda: counts_of(served).attached >= 1)
            fake.run_freely()
            answer = await asked
        assert len(fake.adds) == 1
        assert answer.id == fake.adds[0].request_id
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


async def test_the_openai_sdk_does_not_repeat_a_request_whose_key_is_taken(served: Serving) -> None:
    async with served.openai(max_retries=3) as client:
        await client.completions.create(model="tiny", prompt="a", max_tokens=2, extra_headers=KEY)
        with pytest.raises(openai.UnprocessableEntityError):
            await client.completions.create(
                model="tiny", prompt="b", max_tokens=2, extra_headers=KEY
            )
    assert counts_of(served).refused == 1


async def test_grpc_clients_have_keys_too(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake) as served:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=8),
            n=2,
        )
        fake.allow(3)
        call = served.stub.Generate(request, metadata=METADATA)
        before = [await call.read() for _ in range(3)]
        call.cancel()
        await until(lambda: served.gateway.gate.inside == 0)
        fake.run_freely()
        after = [one async for one in served.stub.Generate(request, metadata=METADATA)]
        assert {one.request_id for one in [*before, *after]} == {before[0].request_id}
        for index, add in enumerate(fake.adds):
            tokens = [t for one in after if one.index == index for t in one.token_ids]
            assert tokens == [formula(PROMPT, add.sampling.seed, place) for place in range(8)]
        assert len(fake.adds) == 2
        assert fake.aborts == []
        request.n = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(request, metadata=METADATA).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_server_that_shuts_down_ends_what_no_client_reads(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake) as served:
        await cut_after(served, 3)
        assert fake.num_running == 1
        await served.gateway.drain()
        await until(lambda: fake.num_running == 0)


async def test_many_at_once_are_computed_once(model: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(model, fake) as served:
        streams = [Stream(served, headers=KEY) for _ in range(20)]
        await until(lambda: counts_of(served).attached == 19)
        fake.run_freely()
        for stream in streams:
            await stream.task
            assert stream.token_ids == expected(30)
        assert len(fake.adds) == 1
