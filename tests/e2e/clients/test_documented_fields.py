"""Every request field has an example in documented_fields.md, and every example is answered."""

import base64
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import json_format
from safetensors.torch import save
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from tests.e2e.conftest import TinyModel
from tests.e2e.documented_fields import Example, examples, fields_of_body, fields_of_message
from tests.e2e.stack import Stack
from tests.e2e.tiny import embed
from tests.plain_http import http_client
from tools import reference_pages

BODIES = {f"POST {path}": body for path, body in reference_pages.BODIES.items()}
MESSAGES = {
    "Generate": gateway_pb2.GenerateRequest,
    "GenerateSession": gateway_pb2.GenerateSessionRequest,
    "Embed": gateway_pb2.EmbedRequest,
    "Tokenize": gateway_pb2.TokenizeRequest,
    "Detokenize": gateway_pb2.DetokenizeRequest,
}
EXAMPLES = examples()
POOLED = ("POST /v1/embeddings", "POST /score", "POST /rerank", "POST /pooling", "Embed")
OF_CLASSES = "POST /classify"

pytestmark = pytest.mark.usefixtures("stack_of")  # most tests use this fixture through `serving`


@pytest.fixture(scope="module")
def server(stack_of: Callable[[str], Stack]) -> Stack:
    """A server that accepts priorities of requests."""
    return stack_of("chunks of 7")


@pytest.fixture
def serving(call: str, request: pytest.FixtureRequest) -> Stack:
    """The server for a call. One server generates tokens, another one computes embeddings."""
    stack: Stack = request.getfixturevalue("embedder" if call in POOLED else "server")
    return stack


def test_every_call_has_its_fields_and_no_other() -> None:
    assert EXAMPLES.keys() == BODIES.keys() | MESSAGES.keys()
    for call, body in BODIES.items():
        expected = set(fields_of_body(body))
        if call == "POST /tokenize":  # fields of messages are documented for chat completions
            expected = {name for name in expected if not name.startswith("messages.")}
        if call == "POST /v1/messages/count_tokens":  # the rest is documented for messages
            expected = {name for name in expected if "." not in name}
        if call == "POST /inference/v1/generate":  # the rest is documented for completions
            expected = {name for name in expected if not name.startswith("sampling_params.")}
        if call.endswith("/derender"):  # nested requests have tables of their own
            inner = ("chat_request.", "completion_request.")
            expected = {name for name in expected if not name.startswith(inner)}
        _expect(call, expected)
    for call, message in MESSAGES.items():
        expected = set(fields_of_message(message.DESCRIPTOR))
        if call == "GenerateSession":  # turns have the fields of Generate
            expected = {name for name in expected if not name.startswith("turn.")}
        _expect(call, expected)


def _expect(call: str, expected: set[str]) -> None:
    given = [example.field for example in EXAMPLES[call]]
    assert sorted(given) == sorted(expected), call
    assert all(example.has_field for example in EXAMPLES[call]), call


@pytest.mark.parametrize("call", [call for call in BODIES if call != OF_CLASSES])
def test_each_example_over_http_is_answered(
    call: str, serving: Stack, tiny_model: TinyModel
) -> None:
    failed = []
    with http_client(base_url=serving.url) as http:
        for example in EXAMPLES[call]:
            body = dict(example.request)
            if body.get("session") == "SESSION":
                body["session"] = http.post("/v1/sessions", json={}).json()["id"]
            if body.get("prompt_embeds") == "EMBEDS":
                matrix = save({"prompt_embeds": _embeds(tiny_model)})
                body["prompt_embeds"] = base64.b64encode(matrix).decode()
            answer = http.post(call.removeprefix("POST "), json=body)
            if answer.status_code != 200:
                failed.append((example.field, answer.text))
    assert not failed


@pytest.mark.parametrize("call", MESSAGES)
async def test_each_example_over_grpc_is_answered(
    call: str, serving: Stack, tiny_model: TinyModel
) -> None:
    failed = []
    async with grpc.aio.insecure_channel(serving.grpc) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        for example in EXAMPLES[call]:
            try:
                assert await _called(stub, example, tiny_model)
            except (grpc.aio.AioRpcError, json_format.ParseError) as error:
                failed.append((example.field, str(error)))
    assert not failed


async def _called(stub: Any, example: Example, tiny_model: TinyModel) -> bool:
    """Makes the gRPC call of an example, and returns whether it was answered."""
    wanted = dict(example.request)
    if "embeds" in wanted:
        numbers = _embeds(tiny_model).numpy().astype("<f4").tobytes()
        wanted["embeds"] = {**wanted["embeds"], "data": base64.b64encode(numbers).decode()}
    message = json_format.ParseDict(wanted, MESSAGES[example.call]())
    if example.call == "GenerateSession":
        call = stub.GenerateSession()
        await call.write(message)
        answer = await call.read()
        call.cancel()
        return answer is not grpc.aio.EOF
    answered = getattr(stub, example.call)(message)
    if example.call == "Generate":
        return bool([piece async for piece in answered])
    return (await answered) is not None


def _embeds(tiny_model: TinyModel) -> torch.Tensor:
    return embed(tiny_model.model, [40])
