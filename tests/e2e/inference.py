"""Calls the gateway's gRPC API in tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import torch
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from tests.e2e.stack import Stack


@dataclass
class Answer:
    """The complete answer to a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    num_cached_tokens: int = 0


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[gateway_pb2_grpc.InferenceStub]:
    """A stub of the gateway's Inference service."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield gateway_pb2_grpc.InferenceStub(channel)


def request(prompt: list[int], max_tokens: int, **sampling: Any) -> gateway_pb2.GenerateRequest:
    """A request for exactly `max_tokens` tokens. It is greedy by default."""
    return gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(
            max_tokens=max_tokens, **{"temperature": 0.0, **sampling}
        ),
        ignore_eos=True,
    )


def embedded_request(rows: torch.Tensor, max_tokens: int) -> gateway_pb2.GenerateRequest:
    """A greedy request whose prompt is given as embeddings, float32 [num_tokens, hidden_size]."""
    embeds = common_pb2.PromptEmbeds(
        num_tokens=len(rows), dtype=common_pb2.EMBEDS_DTYPE_FLOAT32, data=rows.numpy().tobytes()
    )
    return gateway_pb2.GenerateRequest(
        embeds=embeds,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        ignore_eos=True,
    )


async def generate(
    stub: gateway_pb2_grpc.InferenceStub,
    wanted: gateway_pb2.GenerateRequest,
    on_tokens: Callable[[int], None] | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """Sends a request. At each delta, `on_tokens` is called with the number of tokens so far."""
    answer = Answer()
    async for piece in stub.Generate(wanted, timeout=100, metadata=metadata):
        answer.token_ids += piece.token_ids
        answer.text += piece.text
        if piece.finish_reason:
            answer.finish_reason = piece.finish_reason
            answer.num_cached_tokens = piece.usage.num_cached_tokens
        if on_tokens is not None:
            on_tokens(len(answer.token_ids))
    return answer


async def generate_all(
    address: str,
    requests: Sequence[gateway_pb2.GenerateRequest],
    hit: Callable[[], None] | None = None,
    hit_at: int = 0,
) -> list[Answer]:
    """Sends all requests at once. `hit` is called when the first request has `hit_at` tokens."""
    is_hit = hit is None
    first, *others = requests

    def on_tokens(num_tokens: int) -> None:
        nonlocal is_hit
        if hit is not None and not is_hit and num_tokens >= hit_at:
            assert num_tokens < first.sampling.max_tokens
            is_hit = True
            hit()

    async with connect(address) as stub:
        answers = await asyncio.gather(
            generate(stub, first, on_tokens), *(generate(stub, wanted) for wanted in others)
        )
    assert is_hit
    return answers


async def greedy_answers(
    stack: Stack, prompts: Sequence[list[int]], num_tokens: int, victim: str | None = None
) -> list[list[int]]:
    """The tokens of greedy answers to prompts that are sent at once. If a service `victim` is
    given, it is killed when the first answer has 20 tokens.
    """
    requests = [request(prompt, num_tokens) for prompt in prompts]
    hit = None if victim is None else partial(stack.hit, victim)
    answers = await generate_all(stack.grpc, requests, hit, 20)
    return [answer.token_ids for answer in answers]
