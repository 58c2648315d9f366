"""The gateway serves the metrics of every replica, counts HTTP answers, and sends OTLP metrics."""

import asyncio
import re
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from services.common.telemetry import names
from services.gateway.adapters.telemetry.genai_metrics import GenAiMetrics
from services.gateway.core.request.generation import Usage
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until

ASK = {"prompt": "the hello", "max_tokens": 3}
RUNNING = (
    "# HELP vllm:num_requests_running Requests that are running.\n"
    "# TYPE vllm:num_requests_running gauge\n"
    "vllm:num_requests_running{labels} 3.0\n"
)


async def text_of(served: Serving) -> str:
    return (await served.http.get("/metrics")).text


async def test_every_replica_is_told_apart_by_its_address(model: Path) -> None:
    schedulers = FakeScheduler(metrics=RUNNING), FakeScheduler(metrics=RUNNING)
    async with serving(model, *schedulers) as served:
        text = await text_of(served)
    found = re.findall(r'^vllm:num_requests_running\{replica="(\S+)"\} 3\.0$', text, re.M)
    assert sorted(found) == sorted(scheduler.address for scheduler in schedulers)
    assert text.count("# TYPE vllm:num_requests_running gauge\n") == 1
    assert 'stepwell_gateway_replicas{model_name="tiny"} 2.0' in text
    assert 'stepwell_gateway_replicas_without_metrics{model_name="tiny"} 0.0' in text


async def test_a_replica_without_metrics_is_counted_and_holds_up_no_other(model: Path) -> None:
    schedulers = FakeScheduler(metrics=RUNNING), FakeScheduler()
    async with serving(model, *schedulers) as served:
        text = await text_of(served)
        assert text.count("\nvllm:num_requests_running{") == 1
        assert 'stepwell_gateway_replicas_without_metrics{model_name="tiny"} 1.0' in text
        await schedulers[0].die()
        text = await text_of(served)
        assert "vllm:num_requests_running" not in text
        assert 'stepwell_gateway_replicas_without_metrics{model_name="tiny"} 2.0' in text


async def test_http_answers_are_counted_by_route_and_status(served: Serving) -> None:
    await served.http.post("/v1/completions", json=ASK)
    await served.http.post("/v1/completions", json=ASK | {"top_p": 7})
    await served.http.post("/v1/completions", json=ASK | {"stream": True})
    await served.http.get("/v1/models/tiny")
    await served.http.get("/health")
    await served.http.request("PROPFIND", "/nowhere/1")
    text = await text_of(served)
    counted = re.findall(r"^http_requests_total\{(.*)\} (\S+)$", text, re.M)
    assert dict(counted) == {
        'handler="/v1/completions",method="POST",status="2xx"': "2.0",
        'handler="/v1/completions",method="POST",status="4xx"': "1.0",
        'handler="/v1/models/{name:path}",method="GET",status="2xx"': "1.0",
        'handler="none",method="none",status="4xx"': "1.0",
    }
    codes = re.findall(r'^stepwell_gateway_http_responses_total\{code="(\d+)"\} (\S+)$', text, re.M)
    assert dict(codes) == {"200": "3.0", "400": "1.0", "404": "1.0"}
    seconds = 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"} 3.0'
    assert seconds in text


async def test_a_sequence_that_is_sent_again_is_counted(model: Path) -> None:
    schedulers = [FakeScheduler(permits=0), FakeScheduler(permits=0)]
    async with serving(model, *schedulers) as served:
        sending = asyncio.create_task(served.http.post("/v1/completions", json=ASK))
        await until(lambda: any(one.adds for one in schedulers))
        assert "stepwell_gateway_resubmissions_total" in await text_of(served)
        (first,) = [one for one in schedulers if one.adds]
        (second,) = [one for one in schedulers if one is not first]
        second.run_freely()
        await first.die()
        assert (await sending).is_success
        text = await text_of(served)
    assert 'stepwell_gateway_resubmissions_total{model_name="tiny"} 1.0' in text
    assert [add.num_choices for add in (*first.adds, *second.adds)] == [1, 0], (
        "the first one may have counted it"
    )


async def test_only_the_first_sequence_of_a_prompt_says_how_many_there_are(served: Serving) -> None:
    body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 2, "n": 2, "temperature": 1}
    await served.http.post("/v1/completions", json=body)
    assert [add.num_choices for add in served.scheduler.adds] == [2, 0, 2, 0]


async def test_the_scheduler_is_told_whether_a_stop_string_or_a_client_ended_a_sequence(
    model: Path,
) -> None:
    async with serving(model, FakeScheduler(permits=0)) as served:
        scheduler = served.scheduler
        scheduler.answer = served.tokens("the hello") * 9
        stop = {"prompt": "the", "max_tokens": 50, "stop": "hello"}
        stopping = asyncio.create_task(served.http.post("/v1/completions", json=stop))
        scheduler.allow(len(served.tokens("the hello")) + 1)
        assert (await stopping).json()["choices"][0]["finish_reason"] == "stop"
        await until(lambda: len(scheduler.aborts) == 1)
        assert scheduler.stopped == scheduler.aborts
        leaving = asyncio.create_task(served.http.post("/v1/completions", json=stop))
        await until(lambda: len(scheduler.adds) == 2)
        leaving.cancel()
        await until(lambda: len(scheduler.aborts) == 2)
        assert len(scheduler.stopped) == 1


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[dict, int, float]]]:
    """Maps each histogram to its data points: attributes, count and sum."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: [
            (dict(point.attributes), point.count, point.sum) for point in metric.data.data_points
        ]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_the_conventions_histograms_have_their_attributes_and_units() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    genai = GenAiMetrics(provider.get_meter("test"), "tiny")
    genai.completed("chat", 5.0, 1.0, Usage(3, 0, 5), None)
    genai.completed("chat", 2.0, 1.5, Usage(3, 0, 1), None)
    genai.completed("chat", 3.0, None, Usage(3, 0, 0), "step_failed")
    ok = {
        names.GENAI_OPERATION_NAME: "chat",
        names.GENAI_PROVIDER_NAME: "stepwell",
        names.GENAI_REQUEST_MODEL: "tiny",
        names.GENAI_RESPONSE_MODEL: "tiny",
    }
    assert points(reader) == {
        "gen_ai.server.request.duration": [
            (ok, 2, 7.0),
            (ok | {"error.type": "step_failed"}, 1, 3.0),
        ],
        "gen_ai.server.time_to_first_token": [(ok, 2, 2.5)],
        "gen_ai.server.time_per_output_token": [(ok, 1, 1.0)],
    }
    provider.shutdown()
