"""Requests get the same tokens through the gateway and through vllm.grpc.engine."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from services.common.rpc.channel import CHANNEL_OPTIONS
from tests.e2e.stack import Stack

pb = vllm_engine_pb2
PROMPT = list(range(3, 60))


@pytest.fixture
def stub(stack: Stack) -> Iterator[vllm_engine_pb2_grpc.VllmEngineStub]:
    (address,) = stack.vllm_grpc
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def of_gateway(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """Sends a completion to the gateway. Returns the choices of the answer."""
    body = {"model": stack.model, "prompt": PROMPT, "return_token_ids": True, **fields}
    with httpx.Client(verify=False) as http:
        answer = http.post(f"{stack.url}/v1/completions", json=body, timeout=60).raise_for_status()
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def of_engine(
    stub: vllm_engine_pb2_grpc.VllmEngineStub, **fields: Any
) -> list[vllm_engine_pb2.GenerateComplete]:
    """Sends a request to vllm.grpc.engine. Returns its answers, sorted by index."""
    request = pb.GenerateRequest(
        request_id="one",
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**fields),
    )
    answers = [response.complete for response in stub.Generate(request, timeout=60)]
    return sorted(answers, key=lambda answer: answer.index)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True, "min_tokens": 20},
        {"seed": 7},
        {"seed": 7, "n": 3, "temperature": 1.5},
        {"seed": 8, "top_k": 5, "top_p": 0.5, "min_p": 0.125},
        {"seed": 9, "presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 0, "stop_token_ids": list(range(40, 120))},
    ],
    ids=",".join,
)
def test_tokens_are_those_of_the_gateway(
    stack: Stack, stub: vllm_engine_pb2_grpc.VllmEngineStub, fields: dict[str, Any]
) -> None:
    theirs = of_gateway(stack, max_tokens=24, **fields)
    ours = of_engine(stub, max_tokens=24, **fields)
    assert [list(answer.output_ids) for answer in ours] == [one["token_ids"] for one in theirs]
    assert [answer.finish_reason for answer in ours] == [one["finish_reason"] for one in theirs]
    stops = [
        answer.matched_token_id if answer.HasField("matched_token_id") else None for answer in ours
    ]
    assert stops == [one["stop_reason"] for one in theirs]


def test_a_logit_bias_is_that_of_the_gateway(
    stack: Stack, stub: vllm_engine_pb2_grpc.VllmEngineStub
) -> None:
    theirs = of_gateway(stack, max_tokens=8, seed=5, logit_bias={"70": 5.5, "71": -100})
    (ours,) = of_engine(stub, max_tokens=8, seed=5, logit_bias={70: 5.5, 71: -100.0})
    assert list(ours.output_ids) == theirs[0]["token_ids"]


def test_logprobs_are_those_of_the_gateway(
    stack: Stack, stub: vllm_engine_pb2_grpc.VllmEngineStub
) -> None:
    (theirs,) = of_gateway(
        stack, max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=1, echo=False
    )
    (ours,) = of_engine(stub, max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    output = ours.output_logprobs
    assert list(output.token_ids) == list(ours.output_ids) == theirs["token_ids"]
    assert list(output.token_logprobs) == pytest.approx(theirs["logprobs"]["token_logprobs"])
    best = [max(top.values()) for top in theirs["logprobs"]["top_logprobs"]]
    assert [top.values[0] for top in output.top_logprobs] == pytest.approx(best)
    assert {len(top.token_ids) for top in output.top_logprobs} == {2}

    prompt = ours.input_logprobs
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value")
    assert len(prompt.top_logprobs) == len(prompt.token_logprobs) == len(PROMPT)
    rows = theirs["prompt_logprobs"][1:]
    wanted = [row[str(token)]["logprob"] for row, token in zip(rows, PROMPT[1:], strict=True)]
    assert [one.value for one in prompt.token_logprobs[1:]] == pytest.approx(wanted)


def test_a_stream_has_the_same_logprobs(stub: vllm_engine_pb2_grpc.VllmEngineStub) -> None:
    (whole,) = of_engine(stub, max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=0)
    request = pb.GenerateRequest(
        request_id="one",
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(
            max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=0
        ),
        stream=True,
    )
    *chunks, last = list(stub.Generate(request, timeout=60))
    first, *later = [response.chunk for response in chunks]
    assert first.input_logprobs == whole.input_logprobs
    assert not any(chunk.HasField("input_logprobs") for chunk in later)
    streamed = [
        value for chunk in (first, *later) for value in chunk.output_logprobs.token_logprobs
    ]
    assert streamed == list(whole.output_logprobs.token_logprobs)
    assert not last.complete.HasField("output_logprobs")
