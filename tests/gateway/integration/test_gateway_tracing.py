"""The server span of a request, and what goes along with it."""

from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from services.common.telemetry import configure_tracing
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_a_span_tells_the_request_by_its_current_names(model: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("gateway", "", 1.0, exporter=exporter)
    scheduler = FakeScheduler(num_cached_tokens=1)
    async with serving(model, scheduler, tracing=tracing) as served:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "temperature": 0.5,
            "seed": 9,
            "stop": ["zzz"],
        }
        response = await served.http.post(
            "/v1/chat/completions", json=body, headers={"traceparent": PARENT}
        )
        await until(lambda: bool(exporter.get_finished_spans()))
        (span,) = exporter.get_finished_spans()
        assert span.name == "chat tiny"
        assert span.kind is SpanKind.SERVER
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        own = f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert scheduler.adds[0].traceparent == own
        attributes = dict(span.attributes)
        first = attributes.pop("gen_ai.response.time_to_first_chunk")
        assert attributes.pop("gen_ai.latency.time_to_first_token") == first
        assert attributes.pop("gen_ai.latency.e2e") >= first > 0
        assert attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "stepwell",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 0,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.request.seed": 9,
            "gen_ai.request.stop_sequences": ("zzz",),
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.stream": False,
            "gen_ai.response.id": response.json()["id"],
            "gen_ai.response.model": "tiny",
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": response.json()["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 1,
            "stepwell.directory.state": "fallback",  # the pool of one replica is not followed
            "stepwell.routing.replica": scheduler.address,
            "stepwell.routing.reason": "only",
            "stepwell.routing.num_candidates": 1,
            "stepwell.routing.num_cached_tokens": 0,
            "stepwell.routing.num_sent": 1,
        }


async def test_an_error_is_on_the_span(model: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("gateway", "", 1.0, exporter=exporter)
    async with serving(model, FakeScheduler(), tracing=tracing) as served:
        await served.http.post("/v1/completions", json={"prompt": "a", "top_p": 7})
        await until(lambda: bool(exporter.get_finished_spans()))
        (span,) = exporter.get_finished_spans()
        assert span.name == "text_completion tiny"
        assert span.attributes["error.type"] == "invalid_argument"


async def test_what_is_not_sampled_goes_without_a_trace(model: Path) -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("gateway", "", 0.0, exporter=exporter)
    scheduler = FakeScheduler()
    async with serving(model, scheduler, tracing=tracing) as served:
        unsampled = PARENT[:-2] + "00"
        for headers in ({}, {"traceparent": unsampled}, {"traceparent": "nonsense"}):
            await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert [add.traceparent for add in scheduler.adds] == ["", "", ""]
        assert exporter.get_finished_spans() == ()
