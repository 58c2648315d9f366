"""Metrics count each request once: as finished, as ended for another reason, or as refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving

ASK = {"prompt": "the hello", "max_tokens": 3}
FULL = scheduler_pb2.Rejection(code=8, reason="QUEUE_FULL", message="full", retry_after_millis=1)


async def counts(served: Serving) -> dict[str, float]:
    """Counters, and counts of histograms, that are not zero. A key is the metric's name, followed
    by the values of its labels except the model's name.
    """
    text = (await served.http.get("/metrics")).text
    return {
        " ".join([sample.name, *(v for k, v in sample.labels.items() if k != "model_name")]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.value and sample.name.endswith(("_total", "_count"))
        if not sample.name.startswith(("http_", "process_", "stepwell_gateway_http_"))
    }


async def complete(served: Serving, **changes: Any) -> httpx.Response:
    return await served.http.post("/v1/completions", json=ASK | changes)


async def generate(served: Serving, **changes: Any) -> None:
    request = gateway_pb2.GenerateRequest(
        **({"text": "a", "sampling": {"max_tokens": 2}} | changes)
    )
    with pytest.raises(grpc.aio.AioRpcError):
        [response async for response in served.stub.Generate(request)]


REFUSALS: dict[str, Callable[[Serving], Any]] = {
    "invalid_argument": lambda served: complete(served, top_p=7),
    "unsupported_parameter": lambda served: complete(served, suffix="end"),
    "context_length_exceeded": lambda served: complete(served, prompt=[5] * 600),
    "model_not_found": lambda served: complete(served, model="gpt"),
    "queue_full": complete,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", REFUSALS)
async def test_a_refusal_is_counted_by_its_reason_and_as_nothing_else(
    served: Serving, reason: str, stream: bool
) -> None:
    await complete(served, top_p=7, stream=stream)
    if reason == "queue_full":
        served.scheduler.rejection = FULL
    await REFUSALS[reason](served)
    refused = f"vllm:admission_rejections_total {reason}"
    expected = {"vllm:admission_rejections_total invalid_argument": 1.0}
    expected[refused] = expected.get(refused, 0.0) + 1.0
    assert await counts(served) == expected


async def test_refusals_over_grpc_are_counted_alike(served: Serving) -> None:
    await generate(served, sampling={"top_p": 7})
    await generate(served, model="gpt")
    served.scheduler.rejection = FULL
    await generate(served)
    assert await counts(served) == {
        "vllm:admission_rejections_total invalid_argument": 1.0,
        "vllm:admission_rejections_total model_not_found": 1.0,
        "vllm:admission_rejections_total queue_full": 1.0,
    }


async def test_a_request_beyond_the_limit_is_a_refusal(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0), max_concurrent_requests=1) as served:
        first = asyncio.create_task(complete(served))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not served.scheduler.adds:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await complete(served)).status_code == 503
        [(name, count)] = (await counts(served)).items()
        assert (name.split()[0], count) == ("vllm:admission_rejections_total", 1.0)
        served.scheduler.run_freely()
        await first


async def test_an_answer_is_counted_as_one(served: Serving) -> None:
    served.scheduler.num_cached_tokens = 1
    await complete(served, n=2)
    assert await counts(served) == {
        "stepwell_gateway_answers_total length": 2.0,
        "stepwell_gateway_prompt_tokens_total": float(len(served.tokens("the hello"))),
        "stepwell_gateway_prompt_tokens_cached_total": 1.0,
        "stepwell_gateway_generation_tokens_total": 6.0,
        "stepwell_gateway_time_to_first_token_seconds_count": 1.0,
        "stepwell_gateway_inter_token_latency_seconds_count": 4.0,
        "stepwell_gateway_request_seconds_count": 1.0,
    }


async def test_what_an_engine_took_and_gave_up_ended_with_an_error(served: Serving) -> None:
    served.scheduler.engine_error = "the logits held NaN"
    await complete(served)
    assert await counts(served) == {
        "stepwell_gateway_answers_total error": 1.0,
        "stepwell_gateway_prompt_tokens_total": float(len(served.tokens("the hello"))),
        "stepwell_gateway_request_seconds_count": 1.0,
    }
