"""The spans of a request in all services are one trace, linked to the traces of its steps."""

from collections.abc import Iterator

import httpx
import pytest

from services.common.telemetry import names
from tests.e2e.conftest import TinyModel
from tests.e2e.inference import connect, generate, request
from tests.e2e.prompts import PROMPTS, random_tokens
from tests.e2e.stack import SERVICES, Stack, wait_for
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.plain_http import async_http_client, http_post

CLIENT_SPAN = "00f067aa0ba902b7"
ALL_SERVICES = {f"stepwell-{service}" for service in SERVICES}
OF_REQUESTS = ALL_SERVICES - {"stepwell-worker"}
"""The services with spans of requests. Workers have only spans of steps, with links."""


@pytest.fixture(scope="module")
def traced(tiny_model: TinyModel, receiver: OtlpReceiver) -> Iterator[Stack]:
    """A stack that traces all requests, and computes prompts in chunks of 32 tokens."""
    stack = Stack(
        tiny_model.directory,
        *("--otlp-endpoint", receiver.endpoint, "--trace-sample-ratio", "1"),
        *("--trace-step-sample-ratio", "1"),
        *("--max-num-batched-tokens", "32", "--max-num-seqs", "8"),
        environ={
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "STEPWELL_GATEWAY_TRACE_SLOWEST_PER_MINUTE": "0",
        },
    )
    yield stack
    stack.close()


def traceparent(number: int, sampled: bool = True) -> tuple[str, str]:
    """A trace id, and the `traceparent` header of a client with this trace."""
    trace_id = f"4bf92f3577b34da6a3ce929d0e0e{number:04x}"
    return trace_id, f"00-{trace_id}-{CLIENT_SPAN}-{'01' if sampled else '00'}"


def complete(receiver: OtlpReceiver, trace_id: str) -> bool:
    """Whether every service has sent spans of a trace, and no span lacks its parent."""
    spans = receiver.trace(trace_id)
    ids = {span.span_id for span in spans}
    last = {names.SPAN_REQUEST_DECODE, names.SPAN_POOL_ADMIT}
    return (
        last <= {span.name for span in spans}
        and {span.service for span in spans} == OF_REQUESTS
        and {span.parent_id for span in spans} - ids == {CLIENT_SPAN}
    )


def assert_one_tree(spans: list[ReceivedSpan], root_parent: str) -> ReceivedSpan:
    """Asserts that the spans form a tree under `root_parent`. Returns its root."""
    ids = {span.span_id for span in spans}
    (root,) = [span for span in spans if span.parent_id not in ids]
    assert root.parent_id == root_parent
    return root


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_a_request_is_one_trace(api: str, traced: Stack, receiver: OtlpReceiver) -> None:
    trace_id, header = traceparent(1 if api == "http" else 2)
    if api == "http":
        body = {"model": traced.model, "prompt": "x" * 100, "max_tokens": 12, "ignore_eos": True}
        headers = {"traceparent": header, "tracestate": "vendor=a1", "baggage": "user.id=7"}
        async with async_http_client(headers=headers) as http:
            response = await http.post(f"{traced.url}/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK
    else:
        async with connect(traced.grpc) as stub:
            metadata = (
                ("traceparent", header),
                ("tracestate", "vendor=a1"),
                ("baggage", "user.id=7"),
            )
            await generate(stub, request(PROMPTS[9], 12), metadata=metadata)

    wait_for(lambda: complete(receiver, trace_id))
    spans = receiver.trace(trace_id)

    assert {span.service for span in spans} == OF_REQUESTS
    root = assert_one_tree(spans, CLIENT_SPAN)
    assert root.service == "stepwell-gateway"
    for span in spans:
        assert root.span.start_time_unix_nano <= span.span.start_time_unix_nano
        assert span.span.start_time_unix_nano <= span.span.end_time_unix_nano
        if span.service in ("stepwell-gateway", "stepwell-scheduler"):
            assert span.span.trace_state == "vendor=a1"
    (at_scheduler,) = [span for span in spans if span.name == names.SPAN_REQUEST]
    for span in (root, at_scheduler):
        shown = {one.key: one.value.string_value for one in span.span.attributes}
        assert shown["baggage.user.id"] == "7"


async def test_steps_link_to_the_requests_they_served(
    traced: Stack, receiver: OtlpReceiver
) -> None:
    trace_id, header = traceparent(3)
    async with connect(traced.grpc) as stub:
        prompt = random_tokens(90, length=90)
        await generate(stub, request(prompt, 12), metadata=(("traceparent", header),))
    wait_for(lambda: complete(receiver, trace_id))

    def steps() -> list[ReceivedSpan]:
        return [
            span
            for span in tuple(receiver.spans)
            if span.name == names.SPAN_STEP
            and any(link.trace_id.hex() == trace_id for link in span.span.links)
        ]

    def linked() -> set[str]:
        spans = receiver.trace(trace_id)
        return {link.span_id.hex() for span in spans for link in span.span.links}

    def whole(step: ReceivedSpan) -> bool:
        found = [span.name for span in receiver.trace(step.trace_id)]
        return names.SPAN_STEP_EXECUTE in found and all(
            found.count(client) == found.count(server)
            for client, server in (
                (names.SPAN_STEP_EXECUTE, names.SPAN_WORKER_EXECUTE),
                (names.SPAN_STEP_TRANSACT, names.SPAN_POOL_TRANSACT),
            )
        )

    # A prompt of 90 tokens takes three steps of up to 32. The third samples the first output token.
    wait_for(lambda: len(steps()) >= 3 + 11 and all(map(whole, steps())))
    assert linked() == {step.span_id for step in steps()}
    by_name: dict[str, int] = {}
    services = set()
    for step in steps():
        spans = receiver.trace(step.trace_id)
        assert assert_one_tree(spans, "") == step
        for span in spans:
            by_name[span.name] = by_name.get(span.name, 0) + 1
            services.add(span.service)
    assert by_name[names.SPAN_STEP_EXECUTE] == by_name[names.SPAN_WORKER_EXECUTE] == len(steps())
    assert services == ALL_SERVICES - {"stepwell-gateway", "stepwell-scheduler"} | {
        "stepwell-engine-steps"
    }
    # Most decode steps do not call the pool. Each call has a span in scheduler and pool.
    assert by_name[names.SPAN_STEP_TRANSACT] == by_name[names.SPAN_POOL_TRANSACT] >= 1


async def test_an_unsampled_request_leaves_no_span(traced: Stack, receiver: OtlpReceiver) -> None:
    hidden, header = traceparent(4, sampled=False)
    shown, shown_header = traceparent(5)
    async with connect(traced.grpc) as stub:
        await generate(stub, request(PROMPTS[2], 5), metadata=(("traceparent", header),))
        await generate(stub, request(PROMPTS[2], 5), metadata=(("traceparent", shown_header),))
    wait_for(lambda: complete(receiver, shown))
    assert receiver.trace(hidden) == []


def test_a_slow_request_is_traced_by_all_services_though_it_was_not_sampled(
    demo_stack: Stack, demo_receiver: OtlpReceiver
) -> None:
    """Every request to this stack is slow, so the gateway requests the scheduler's spans. It does
    so for at most 30 requests a minute. A request is not traced if many were sent shortly before.
    """
    root_name = f"text_completion {demo_stack.model}"
    wanted = {root_name, names.SPAN_GATEWAY_ENGINE, names.SPAN_REQUEST}
    sent: list[str] = []

    def traced() -> list[dict[str, ReceivedSpan]]:
        traces = [{one.name: one for one in demo_receiver.trace(trace_id)} for trace_id in sent]
        return [spans for spans in traces if wanted <= spans.keys()]

    def one_is_traced() -> bool:
        trace_id, header = traceparent(6 + len(sent), sampled=False)
        body = {"model": demo_stack.model, "prompt": "one two", "max_tokens": 5}
        headers = {"traceparent": header}
        assert http_post(f"{demo_stack.url}/v1/completions", json=body, headers=headers).is_success
        sent.append(trace_id)
        return bool(traced())

    wait_for(one_is_traced, period=0.5)
    found = traced()[0]
    assert found[names.SPAN_REQUEST].parent_id == found[names.SPAN_GATEWAY_ENGINE].span_id
    assert found[root_name].parent_id == CLIENT_SPAN
