"""Tests the gRPC API through all four services."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from tests.e2e.inference import connect, generate, request
from tests.e2e.stack import Stack
from tests.e2e.tiny import MAX_MODEL_LEN


async def test_the_model_is_listed(stack: Stack) -> None:
    async with connect(stack.grpc) as stub:
        response = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=60)
    (model,) = response.models
    assert (model.name, model.max_model_len) == (stack.model, MAX_MODEL_LEN)
    assert model.num_ready_replicas == 1


async def test_detokenize_gives_back_what_tokenize_was_given(stack: Stack) -> None:
    async with connect(stack.grpc) as stub:
        tokens = await stub.Tokenize(gateway_pb2.TokenizeRequest(text="größer"), timeout=60)
        text = await stub.Detokenize(
            gateway_pb2.DetokenizeRequest(token_ids=tokens.token_ids), timeout=60
        )
    assert len(tokens.token_ids) == 8  # each token is one byte
    assert tokens.max_model_len == MAX_MODEL_LEN
    assert text.text == "größer"


async def test_text_in_and_text_out(stack: Stack) -> None:
    wanted = gateway_pb2.GenerateRequest(
        text="hello",
        sampling=common_pb2.SamplingParams(max_tokens=20, temperature=0),
        ignore_eos=True,
    )
    async with connect(stack.grpc) as stub:
        answer = await generate(stub, wanted)
        text = await stub.Detokenize(
            gateway_pb2.DetokenizeRequest(token_ids=answer.token_ids), timeout=60
        )
    assert len(answer.token_ids) == 20
    assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
    for special in ("<pad>", "<s>", "</s>"):
        text.text = text.text.replace(special, "")
    assert answer.text == text.text


async def test_an_answer_that_repeats_itself_ends(stack: Stack) -> None:
    detection = common_pb2.RepetitionDetection(max_pattern_size=3, min_count=4)
    wanted = request([5, 6, 7], 50, allowed_token_ids=[65], repetition_detection=detection)
    async with connect(stack.grpc) as stub:
        answer = await generate(stub, wanted)
    assert answer.token_ids == [65, 65, 65, 65]
    assert answer.finish_reason == common_pb2.FINISH_REASON_REPETITION


async def test_a_bad_parameter_names_its_field(stack: Stack) -> None:
    async with connect(stack.grpc) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(stub, request([5, 6, 7], 4, top_p=3.0))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in (refusal.value.details() or "")


async def test_the_gateway_is_healthy_by_grpcs_own_service(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ready", "stepwell.gateway.v1.Inference"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=60)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"stepwell.gateway.v1.Inference", "grpc.health.v1.Health"} <= names
