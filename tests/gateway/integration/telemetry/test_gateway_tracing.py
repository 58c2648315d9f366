"""The gateway's spans of a request, which cover its whole time, and their attributes."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from opentelemetry.trace import SpanKind
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry.trace_context import parse_traceparent
from services.gateway.adapters.telemetry.request_spans import MAX_SPANS
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving, until
from tests.gateway.spans import Tracer, assert_adds_up, span_id
from tests.gateway.streams import PROMPT, Stream

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"
TIMES = scheduler_pb2.RequestTimes(
    queue_nanos=1_000_000,
    prefill_nanos=2_000_000,
    decode_nanos=3_000_000,
    interrupted_nanos=5,
    parts=[
        scheduler_pb2.TimePart(name=name, nanos=millis * 1_000_000)
        for name, millis in (("slots", 1), ("prefill", 2), ("decode", 3))
    ],
)


async def test_a_span_tells_the_request_by_its_current_names(model: Path) -> None:
    tracer, scheduler = Tracer(), FakeScheduler(num_cached_tokens=1, times=TIMES)
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "temperature": 0.5,
            "seed": -9,
            "stop": ["zzz"],
        }
        response = await served.http.post(
            "/v1/chat/completions", json=body, headers={"traceparent": PARENT}
        )
        trace = await tracer.trace()
        root = trace.root
        assert root.name == "chat tiny"
        assert root.kind is SpanKind.SERVER
        assert f"{root.context.trace_id:032x}" == TRACE == response.headers["x-trace-id"]
        assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
        attributes = dict(root.attributes)
        first = attributes.pop("gen_ai.response.time_to_first_chunk")
        assert attributes.pop("gen_ai.latency.time_to_first_token") == first
        seconds = attributes.pop("gen_ai.latency.e2e")
        assert seconds >= first > 0
        assert seconds == pytest.approx((root.end_time - root.start_time) / 1e9)
        line = attributes.pop("stepwell.time")
        parts = {name for name in attributes if name.startswith("stepwell.time.")}
        assert parts >= {"stepwell.time.slots", "stepwell.time.gateway"}
        assert seconds == pytest.approx(sum(attributes.pop(name) for name in parts))
        assert "slots" in line
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
            "gen_ai.request.seed": -9,
            "gen_ai.request.stop_sequences": ["zzz"],
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.stream": False,
            "gen_ai.response.id": response.json()["id"],
            "gen_ai.response.model": "tiny",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": response.json()["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 1,
            "gen_ai.latency.time_in_queue": 0.001,
            "gen_ai.latency.time_in_model_prefill": 0.002,
            "gen_ai.latency.time_in_model_decode": 0.003,
            "gen_ai.latency.time_in_model_inference": 0.005,
            "stepwell.request.id": response.headers["x-request-id"],
            "http.response.status_code": 200,
            "stepwell.kept_for": "sampled",
            "stepwell.wait_seconds": 0.0,
            "stepwell.directory.state": "unused",  # the directory is not read for one replica
            "stepwell.routing.replica": scheduler.address,
            "stepwell.routing.reason": "only",
            "stepwell.routing.num_candidates": 1,
            "stepwell.routing.num_cached_tokens": 0,
            "stepwell.routing.num_sent": 1,
        }


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_the_parts_of_a_request_are_all_of_its_time(model: Path, api: str) -> None:
    tracer, scheduler = Tracer(), FakeScheduler()
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        if api == "http":
            body = {"prompt": "hello", "max_tokens": 4, "n": 2, "stream": True}
            await served.http.post("/v1/completions", json=body)
        else:
            request = gateway_pb2.GenerateRequest(text="hello", n=2, sampling={"max_tokens": 4})
            async for _ in served.stub.Generate(request):
                pass
        trace = await tracer.trace()
        assert_adds_up(trace)
        assert [span.name for span in trace.below(trace.root)] == [
            "gateway.admit",
            "gateway.read",
            "gateway.parse",
            "gateway.tokenize",
            "gateway.prepare",
            "gateway.generate",
            "gateway.write",
        ]
        (generate,) = trace.named("gateway.generate")
        for number, add in enumerate(scheduler.adds):
            route, engine = [
                span
                for span in trace.below(generate)
                if span.attributes["stepwell.sequence"] == number
            ]
            assert route.name == "gateway.route"
            assert route.attributes["stepwell.routing.reason"] == ["only", "same_prompt"][number]
            assert (engine.name, engine.kind) == ("gateway.engine", SpanKind.CLIENT)
            assert engine.attributes["stepwell.outcome"] == "finished"
            # The scheduler creates its own spans as children of this span.
            assert parse_traceparent(add.traceparent).span_id == span_id(engine)


@pytest.mark.parametrize("late", [-60.0, 0.0, 60.0], ids=["behind", "equal", "ahead"])
async def test_what_is_not_the_replicas_time_is_on_the_way_there_or_back(
    model: Path, late: float
) -> None:
    """The clock of the replica may be behind the gateway's clock or ahead of it."""
    tracer, scheduler = Tracer(), FakeScheduler()
    scheduler.times = scheduler_pb2.RequestTimes(
        queue_nanos=100, prefill_nanos=200, queued_unix_nanos=time.time_ns() + int(late * 1e9)
    )
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        await served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        trace = await tracer.trace()
        engine = trace.only("gateway.engine")
        send, receive = trace.below(engine)
        assert (send.name, receive.name) == ("gateway.send", "gateway.receive")
        assert send.start_time == engine.start_time
        assert receive.start_time - send.end_time == 300
        assert receive.end_time == engine.end_time
        if late:
            nothing = receive if late > 0 else send
            assert nothing.start_time == nothing.end_time


async def test_a_request_that_loses_its_scheduler_is_resubmitted_for_that_cause(
    model: Path,
) -> None:
    tracer, scheduler = Tracer(), FakeScheduler(permits=3)
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 3)
        await scheduler.die()
        await until(lambda: served.gateway.membership.num_ready == 0)
        scheduler.run_freely()
        await scheduler.start()
        await stream.task
        trace = await tracer.trace()
        assert_adds_up(trace)
        names = [span.name for span in trace.below(trace.only("gateway.generate"))]
        assert names == [f"gateway.{p}" for p in ["route", "engine", "resubmit", "route", "engine"]]
        lost, last = trace.named("gateway.engine")
        assert lost.attributes["stepwell.outcome"] == "scheduler_lost"
        assert last.attributes["stepwell.outcome"] == "finished"
        resubmit = trace.only("gateway.resubmit")
        assert resubmit.attributes["stepwell.resubmit.cause"] == "scheduler_lost"
        seconds = (resubmit.end_time - resubmit.start_time) / 1e9
        assert trace.root.attributes["stepwell.wait_seconds"] == pytest.approx(seconds)
        assert trace.root.attributes["stepwell.routing.num_sent"] == 2
        sent = [parse_traceparent(add.traceparent).span_id for add in scheduler.adds]
        assert sent == [span_id(lost), span_id(last)]


async def test_a_request_that_finds_no_replica_waits_for_one(model: Path) -> None:
    tracer, scheduler = Tracer(), FakeScheduler()
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        scheduler.set_state(ready=False, reason="its pool is away")
        await until(lambda: served.gateway.membership.num_ready == 0)
        stream = Stream(served)
        await until(lambda: served.gateway.fleet.num_waiting == 1)
        scheduler.set_state(ready=True)
        await stream.task
        trace = await tracer.trace()
        assert_adds_up(trace)
        wait = trace.only("gateway.wait")
        assert wait.attributes["stepwell.wait_reason"] == "no_replica"


async def test_a_refusal_by_one_replica_is_the_cause_of_asking_another(model: Path) -> None:
    tracer = Tracer()
    full = FakeScheduler(max_requests=0)
    free = FakeScheduler()
    async with serving(
        model, full, free, tracing=tracer.tracing, routing_policy="round-robin"
    ) as served:
        for _ in range(2):  # each replica is the first choice once
            answer = await served.http.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 200
        traces = [await tracer.trace(0), await tracer.trace(1)]
        (refused,) = [trace for trace in traces if trace.named("gateway.resubmit")]
        assert_adds_up(refused)
        cause = refused.only("gateway.resubmit").attributes["stepwell.resubmit.cause"]
        assert cause == "queue_full"
        outcomes = [e.attributes["stepwell.outcome"] for e in refused.named("gateway.engine")]
        assert outcomes == ["refused", "finished"]


async def test_the_time_of_a_client_that_reads_slowly_is_that_of_writing(model: Path) -> None:
    """All tokens arrive at the gateway long before the client has read them."""
    tracer = Tracer()
    big = {"max_model_len": 60_000, "max_request_tokens": 60_000, "tokens_per_step": 500}
    async with serving(model, FakeScheduler(**big), tracing=tracer.tracing) as served:
        request = gateway_pb2.GenerateRequest(
            token_ids={"ids": PROMPT}, sampling={"max_tokens": 50_000, "logprobs": 5}
        )
        call = served.stub.Generate(request)
        await call.read()
        await until(lambda: served.scheduler.num_running == 0)
        await asyncio.sleep(0.3)  # the client's pause before it continues to read
        while await call.read() is not grpc.aio.EOF:
            pass
        trace = await tracer.trace()
        assert_adds_up(trace)
        write = trace.only("gateway.write")
        assert write.end_time - write.start_time >= 250_000_000
        assert write.attributes["stepwell.write_seconds"] >= 0.25


async def test_what_is_not_sampled_goes_without_a_trace(model: Path) -> None:
    tracer, scheduler = Tracer(0.0), FakeScheduler()
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        for headers in ({}, {"traceparent": UNSAMPLED}, {"traceparent": "nonsense"}):
            await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        # Failed requests are always traced, except if their client caused the failure.
        await served.http.post("/v1/completions", json={"prompt": "a", "top_p": 7})
        assert [add.traceparent for add in scheduler.adds] == ["", "", ""]
        assert tracer.spans == ()
        assert scheduler.keeps == []


async def test_a_request_that_fails_is_traced_though_it_was_not_sampled(model: Path) -> None:
    tracer, scheduler = Tracer(0.0), FakeScheduler(engine_error="NaN")
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        await served.http.post(
            "/v1/completions",
            json={"prompt": "a"},
            headers={"traceparent": UNSAMPLED, "tracestate": "vendor=a1"},
        )
        trace = await tracer.trace()
        assert_adds_up(trace)
        assert trace.root.attributes["stepwell.kept_for"] == "failed"
        assert f"{trace.root.context.trace_id:032x}" == TRACE
        # The gateway requests the scheduler's spans, whose parent is the span `gateway.engine`.
        await until(lambda: len(scheduler.keeps) == 1)
        (keep,), (add,) = scheduler.keeps, scheduler.adds
        assert keep.request_id == add.request_id
        kept = parse_traceparent(keep.traceparent)
        assert kept.trace_id == trace.root.context.trace_id
        assert kept.trace_flags.sampled
        assert kept.span_id == span_id(trace.only("gateway.engine"))
        assert keep.tracestate == "vendor=a1"
        metrics = (await served.http.get("/metrics")).text
        assert 'stepwell_traces_kept_total{model_name="tiny",reason="failed"} 1.0' in metrics


async def test_a_request_that_takes_long_is_traced_though_it_was_not_sampled(model: Path) -> None:
    tracer, scheduler = Tracer(0.0), FakeScheduler(permits=0)
    settings = {"trace_slow_seconds": 0.2}
    async with serving(model, scheduler, tracing=tracer.tracing, **settings) as served:
        stream = Stream(served)
        await until(lambda: scheduler.num_running == 1)
        await asyncio.sleep(0.2)  # after this time, the request counts as slow
        scheduler.run_freely()
        await stream.task
        trace = await tracer.trace()
        assert trace.root.attributes["stepwell.kept_for"] == "slow"
        assert_adds_up(trace)
        await until(lambda: len(scheduler.keeps) == 1)


async def test_the_spans_of_a_request_with_many_answers_are_all_there(model: Path) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(), tracing=tracer.tracing) as served:
        body = {"prompt": "a", "n": 256, "max_tokens": 1}
        await served.http.post("/v1/completions", json=body)
        trace = await tracer.trace()
        assert len(trace.named("gateway.engine")) == 256
        assert "stepwell.num_dropped_spans" not in trace.root.attributes
        assert_adds_up(trace, start_millis=10_000)


async def test_the_spans_of_a_request_with_more_answers_are_bounded(model: Path) -> None:
    """Each sequence has the same limit on its number of spans. Dropped spans are counted, and the
    remaining spans cover the whole time.
    """
    tracer = Tracer()
    settings = {"max_choices_per_request": 700}
    async with serving(model, FakeScheduler(), tracing=tracer.tracing, **settings) as served:
        body = {"prompt": "a", "n": 700, "max_tokens": 1}
        await served.http.post("/v1/completions", json=body)
        trace = await tracer.trace()
        assert len(trace.spans) <= MAX_SPANS
        sequences = trace.below(trace.only("gateway.generate"))
        assert {one.attributes["stepwell.sequence"] for one in sequences} == set(range(700))
        cut = [one.attributes.get("stepwell.num_dropped_spans", 0) for one in sequences]
        num_left_out = trace.root.attributes["stepwell.num_dropped_spans"]
        assert num_left_out == sum(cut) > 0
        assert len(sequences) + num_left_out == 1400
        assert_adds_up(trace, start_millis=10_000)
        metrics = (await served.http.get("/metrics")).text
        assert f'stepwell_trace_spans_cut_total{{model_name="tiny"}} {num_left_out}.0' in metrics


async def test_a_tracestate_goes_on(model: Path) -> None:
    tracer = Tracer()
    async with serving(model, FakeScheduler(), tracing=tracer.tracing) as served:
        state = "vendor=a1,other=b2"
        headers = {"traceparent": PARENT, "tracestate": state}
        await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        trace = await tracer.trace()
        for span in trace.spans:
            assert dict(span.context.trace_state) == {"vendor": "a1", "other": "b2"}
        assert served.scheduler.adds[0].tracestate == state


async def test_baggage_goes_on_and_is_on_the_span(model: Path) -> None:
    """The baggage reaches the scheduler even if the request is not sampled."""
    tracer, scheduler = Tracer(), FakeScheduler()
    async with serving(model, scheduler, tracing=tracer.tracing) as served:
        baggage = "user.id=a%20b;secret=1, stage = canary ,none"
        for traceparent in (PARENT, UNSAMPLED):
            headers = {"traceparent": traceparent, "baggage": baggage}
            await served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert [add.baggage for add in scheduler.adds] == [baggage, baggage]
        trace = await tracer.trace()
        shown = {k: v for k, v in trace.root.attributes.items() if k.startswith("baggage")}
        assert shown == {"baggage.user.id": "a b", "baggage.stage": "canary"}


async def test_every_answer_names_its_request_and_its_trace(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0, rejection=None)) as served:
        headers = {"traceparent": PARENT, "X-Request-Id": "mine"}
        for method, path in (("GET", "/health"), ("GET", "/nothing"), ("POST", "/v1/completions")):
            answer = await served.http.request(method, path, headers=headers)
            assert answer.headers["x-trace-id"] == TRACE, path
            assert answer.headers["x-request-id"] == "mine"
        new = (await served.http.get("/health")).headers["x-trace-id"]
        assert len(new) == 32
        assert int(new, 16)


async def test_a_grpc_call_ends_with_the_names_of_its_request_and_its_trace(model: Path) -> None:
    async with serving(model, FakeScheduler()) as served:
        request = gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2})
        call = served.stub.Generate(request, metadata=(("traceparent", PARENT),))
        async for answer in call:
            answer_id = answer.request_id
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-trace-id"] == TRACE
        assert answer_id == f"gen-{trailing['x-request-id']}"
        # A refused request has these names in its trailing metadata, too.
        request = gateway_pb2.GenerateRequest(text="", request_id="mine")
        call = served.stub.Generate(request, metadata=(("traceparent", PARENT),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        trailing = dict(caught.value.trailing_metadata())
        assert (trailing["x-trace-id"], trailing["x-request-id"]) == (TRACE, "mine")
        assert "grpc-status-details-bin" in trailing


async def test_a_sampled_request_is_the_exemplar_of_its_bucket(model: Path) -> None:
    async with serving(model, FakeScheduler(), tracing=Tracer().tracing) as served:
        for traceparent in (PARENT, UNSAMPLED.replace(TRACE, "1" * 32)):
            headers = {"traceparent": traceparent}
            body = {"prompt": "hello", "max_tokens": 1}
            await served.http.post("/v1/completions", json=body, headers=headers)
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        text = (await served.http.get("/metrics", headers=accept)).text
    exemplars = [line for line in text.splitlines() if " # {" in line]
    assert {line.partition("_bucket{")[0] for line in exemplars} == {
        "stepwell_gateway_time_to_first_token_seconds",
        "stepwell_gateway_request_seconds",
    }
    assert all(f'trace_id="{TRACE}"' in line for line in exemplars)
