"""The gateway's gRPC service `Inference`."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from services.common.rpc.status import from_rpc_error
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving

HELLO = [{"role": "user", "content": "hello"}]


async def generate(served: Serving, **fields: Any) -> list[gateway_pb2.GenerateResponse]:
    return [r async for r in served.stub.Generate(gateway_pb2.GenerateRequest(**fields))]


async def test_text_in_text_out(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the 世界 world")
    responses = await generate(served, text="hello", sampling={"max_tokens": 50, "logprobs": 1})
    assert "".join(response.text for response in responses) == "the 世界 world"
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == [*served.scheduler.answer, 0]
    assert sum(len(response.logprobs.ranks) for response in responses) == len(tokens)
    last = responses[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert last.usage.num_generated_tokens == len(tokens)


async def test_it_agrees_with_http(served: Serving) -> None:
    sampling = {"max_tokens": 9, "seed": 4}
    responses = await generate(served, text="hello", sampling=sampling, n=2, request_id="r")
    texts = ["", ""]
    for response in responses:
        texts[response.index] += response.text
    body = {"prompt": "hello", "n": 2} | sampling
    over_http = (await served.http.post("/v1/completions", json=body)).json()
    assert texts == [choice["text"] for choice in over_http["choices"]]
    assert {response.request_id for response in responses} == {"r"}


async def test_a_chat_and_a_stop_string(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the hello world")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    responses = await generate(served, chat=chat, stop=["lo w"])
    assert "".join(response.text for response in responses) == "the hel"
    assert responses[-1].stop_string == "lo w"


async def test_an_answer_that_goes_round_in_circles_says_so(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the" + " world" * 50)
    sampling = {
        "max_tokens": 400,
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 3},
    }
    responses = await generate(served, text="hello", sampling=sampling)
    assert "".join(response.text for response in responses) == "the" + " world" * 3
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_REPETITION
    assert responses[-1].WhichOneof("stop_reason") is None


async def test_nan_in_the_logits_is_an_error_that_says_so(served: Serving) -> None:
    served.scheduler.engine_error = "the logits held NaN"
    with pytest.raises(grpc.aio.AioRpcError, match="the logits held NaN") as ended:
        await generate(served, text="hello")
    assert ended.value.code() == grpc.StatusCode.INTERNAL
    error = from_rpc_error(ended.value)
    assert (error.error_reason, error.message) == ("NAN_IN_LOGITS", "the logits held NaN")


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        (
            {"text": "a", "sampling": {"repetition_detection": {"max_pattern_size": 3}}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "repetition_detection.min_count",
        ),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ({"token_ids": {"ids": [5] * 600}}, grpc.StatusCode.OUT_OF_RANGE, "prompt"),
        ({"token_ids": {"ids": [999]}}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"text": "a", "model": "gpt"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"text": "a", "n": 0}, grpc.StatusCode.INVALID_ARGUMENT, "n"),
        (
            {
                "embeds": {
                    "num_tokens": 2,
                    "dtype": common_pb2.EMBEDS_DTYPE_BFLOAT16,
                    "data": b"\x80\x3f" * 7 + b"\x80\x7f",
                }
            },
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt_embeds",
        ),
        ({"text": "a", "sampling": {"top_k": 2**31}}, grpc.StatusCode.INVALID_ARGUMENT, "top_k"),
        (
            {"text": "a", "sampling": {"temperature": float("nan")}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            {"text": "a", "sampling": {"top_p": float("inf")}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "top_p",
        ),
        ({"text": "a", "request_id": "two words"}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"text": "a", "request_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"chat": {}}, grpc.StatusCode.INVALID_ARGUMENT, "chat.messages"),
        (
            {"chat": {"messages": [*HELLO, {"role": "tool", "content": "x"}]}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "chat.messages[1].role",
        ),
        (
            {"text": "a", "sampling": {"eos_token_ids": [5]}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.eos_token_ids",
        ),
        (
            {
                "text": "a",
                "sampling": {"logit_bias_token_ids": [5, 5], "logit_bias_values": [1, 2]},
            },
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.logit_bias_token_ids",
        ),
        (
            {"text": "a", "sampling": {"bad_words": [{"ids": []}]}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_words",
        ),
        (
            {"text": "a", "sampling": {"min_tokens": 2**32 - 1}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "min_tokens",
        ),
        (
            {"text": "a", "sampling": {"max_tokens": 2**32 - 1}},
            grpc.StatusCode.OUT_OF_RANGE,
            "max_tokens",
        ),
        (
            {"text": "a", "sampling": {"logprobs": 2**32 - 1}},
            grpc.StatusCode.INVALID_ARGUMENT,
            "logprobs",
        ),
        ({"text": "a", "n": 2**32 - 1}, grpc.StatusCode.INVALID_ARGUMENT, "n"),
        ({"text": "a", "priority": -(2**31)}, grpc.StatusCode.INVALID_ARGUMENT, "priority"),
    ],
)
async def test_what_is_wrong_is_named(
    served: Serving, fields: dict[str, Any], status: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(served, **fields)
    assert caught.value.code() == status
    rich = rpc_status.from_call(caught.value)
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in rich.details if detail.Is(bad.DESCRIPTOR))
    assert bad.field_violations[0].field == field
    assert served.scheduler.adds == []


async def test_tokenize_detokenize_and_models(served: Serving) -> None:
    tokenized = await served.stub.Tokenize(gateway_pb2.TokenizeRequest(text="the 世界"))
    assert list(tokenized.token_ids) == served.tokens("the 世界")
    assert tokenized.max_model_len == 512
    text = await served.stub.Detokenize(
        gateway_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
    )
    assert text.text == "the 世界"
    (model,) = (await served.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.num_ready_replicas) == ("tiny", 512, 1)


async def test_a_developers_turn_is_rendered_as_over_http(served: Serving) -> None:
    """The chat template has no such role."""
    turns = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}]
    over_http = (await served.http.post("/tokenize", json={"messages": turns})).json()
    request = gateway_pb2.TokenizeRequest(chat={"messages": turns})
    assert list((await served.stub.Tokenize(request)).token_ids) == over_http["tokens"]


async def test_health_follows_the_replicas(model: Path) -> None:
    async with serving(model, FakeScheduler(), resubmit_timeout_seconds=0.2) as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        states = health_pb2.HealthCheckResponse.ServingStatus

        async def wait_for(state: int) -> None:
            async with asyncio.timeout(60):
                for name in ("ready", "stepwell.gateway.v1.Inference"):
                    request = health_pb2.HealthCheckRequest(service=name)
                    while (await health.Check(request)).status != state:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)

        await wait_for(states.SERVING)
        await served.scheduler.die()
        await wait_for(states.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served, text="a")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await served.scheduler.start()
        await wait_for(states.SERVING)
