"""If no token can satisfy a request's grammar, the request ends with a client error that states the
reason: an HTTP status if the answer has not begun, otherwise an event in its stream.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry.proto.trace.v1 import trace_pb2
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.telemetry import names
from tests.e2e.inference import connect, generate, request
from tests.e2e.stack import Stack, wait_for
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.plain_http import async_http_client
from tests.scheduler.serving_replica import Gateway, sampling

PROMPT = "class Point:"
TOO_COMPLEX = ".*a.{200}b.{200}c"
"""A regular expression whose automaton grows with each token, up to the limit on its size."""
CLIENT_SPAN = "00f067aa0ba902b7"
FAILING = {"structured_outputs": {"regex": TOO_COMPLEX}, "max_tokens": 900, "temperature": 2}


@pytest.fixture
async def http(demo_stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with async_http_client(base_url=demo_stack.url, timeout=100) as client:
        yield client


def body(seed: int, **others: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 8, "seed": seed, **others}


async def ask(http: httpx.AsyncClient, wanted: dict[str, Any]) -> httpx.Response:
    return await http.post("/v1/completions", json=wanted)


def events(streamed: httpx.Response) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


async def test_what_becomes_too_complex_is_the_clients_error_and_its_neighbours_go_on(
    http: httpx.AsyncClient,
) -> None:
    neighbour = body(2, max_tokens=300, ignore_eos=True)
    alone = await ask(http, neighbour)
    whole, streamed, beside = await asyncio.gather(
        ask(http, body(1, **FAILING)),
        ask(http, body(1, **FAILING, stream=True)),
        ask(http, neighbour),
    )
    error = whole.json()["error"]
    assert (whole.status_code, error["param"], error["code"]) == (
        *(400, "structured_outputs"),
        "grammar_error",
    )
    assert error["message"].startswith("structured_outputs: the grammar cannot be continued after ")
    assert error["message"].endswith("lexer error: too many states: 20000 >= 20000")
    *pieces, last = events(streamed)
    assert streamed.status_code == 200
    assert last == {"error": error}, "the same request, the same end"
    assert all("error" not in piece for piece in pieces)
    assert beside.json()["choices"] == alone.json()["choices"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_parameters_that_leave_no_first_token_are_a_status(
    form: dict[str, Any], param: str, http: httpx.AsyncClient, *, stream: bool
) -> None:
    (dot,) = (await http.post("/tokenize", json={"prompt": "."})).json()["tokens"]
    refused = await ask(http, body(1, **form, allowed_token_ids=[dot], stream=stream))
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": f"{param}: allowed_token_ids leave no token that conforms after 0 tokens of "
        "this answer",
        "type": "invalid_request_error",
        "param": param,
        "code": "no_conforming_token",
    }


async def test_parameters_that_leave_no_later_token_end_a_stream(http: httpx.AsyncClient) -> None:
    (dot,) = (await http.post("/tokenize", json={"prompt": "."})).json()["tokens"]
    wanted = body(1, structured_outputs={"regex": r"\.x"}, allowed_token_ids=[dot], stream=True)
    first, last = events(await ask(http, wanted))
    assert first["choices"][0]["text"] == "."
    assert last["error"]["code"] == "no_conforming_token"
    assert "conforms after 1 tokens" in last["error"]["message"]


async def test_what_only_the_worker_refuses_is_the_clients_error(
    demo_stack: Stack, http: httpx.AsyncClient
) -> None:
    """The scheduler gets the request directly, because the gateway would refuse its grammar."""
    (replica,) = (await http.get("/status")).json()["replicas"]
    wrong = common_pb2.StructuredOutputs(kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text="(")
    async with open_channel(replica["address"]) as channel:
        gateway = Gateway(scheduler_pb2_grpc.SchedulerStub(channel))
        await gateway.open()
        await gateway.add(1, [5, 6, 7], sampling=sampling(structured_outputs=wrong))
        await gateway.finish(1)
        await gateway.close()
    finished = gateway.heard[1].finished
    assert finished is not None
    assert finished.reason == common_pb2.FINISH_REASON_GRAMMAR_ERROR
    assert finished.message.startswith("structured_outputs: regex: ")
    assert "unclosed group" in finished.message
    assert any(
        "request ended, because of an error of the client: structured_outputs" in line
        for line in demo_stack.output
    )


async def test_over_grpc_it_is_an_invalid_argument(demo_stack: Stack) -> None:
    regex = common_pb2.StructuredOutputs(
        kind=common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, text=TOO_COMPLEX
    )
    async with connect(demo_stack.grpc) as stub:
        wanted = request([5, 6, 7], 900, structured_outputs=regex, temperature=2.0, seed=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stub, wanted)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "too many states" in (refused.value.details() or "")
    rich = rpc_status.from_call(refused.value)
    assert rich is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert rich.details[0].Unpack(info)
    assert rich.details[1].Unpack(bad)
    assert info.reason == "GRAMMAR_ERROR"
    assert bad.field_violations[0].field == "structured_outputs"


async def test_its_spans_say_why_and_are_no_failures(
    http: httpx.AsyncClient, demo_receiver: OtlpReceiver
) -> None:
    (dot,) = (await http.post("/tokenize", json={"prompt": "."})).json()["tokens"]
    wanted = body(1, structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=[dot])
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
    refused = await http.post("/v1/completions", json=wanted, headers=headers)
    assert refused.headers["x-trace-id"] == trace_id

    def at_scheduler() -> list[ReceivedSpan]:
        return [span for span in demo_receiver.trace(trace_id) if span.name == names.SPAN_REQUEST]

    def roots() -> list[ReceivedSpan]:
        return [span for span in demo_receiver.trace(trace_id) if span.parent_id == CLIENT_SPAN]

    wait_for(lambda: bool(at_scheduler() and roots()))
    (request_span,), (root,) = at_scheduler(), roots()
    said = {one.key: one.value.string_value for one in request_span.span.attributes}
    assert said[names.ATTR_FINISH_REASON] == "no_conforming_token"
    assert request_span.span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
    said = {one.key: one.value.string_value for one in root.span.attributes}
    assert said[names.ATTR_CLIENT_ERROR] == "no_conforming_token"
    assert root.span.status.code == trace_pb2.Status.STATUS_CODE_UNSET
