"""Prompts of embeddings are continued like the same prompts as tokens, over HTTP and gRPC."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import connect, embedded_request, generate
from tests.e2e.prompts import PROMPTS, random_tokens
from tests.e2e.stack import Stack
from tests.e2e.tiny import embed, greedy
from tests.plain_http import async_http_client

NUM_TOKENS = 24


def as_file(matrix: torch.Tensor) -> str:
    return base64.b64encode(save({"prompt_embeds": matrix})).decode()


def body(files: str | list[str], **changes: Any) -> dict[str, Any]:
    return {
        "prompt_embeds": files,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


async def complete(stack: Stack, wanted: dict[str, Any]) -> httpx.Response:
    async with async_http_client(base_url=stack.url, timeout=60) as client:
        return await client.post("/v1/completions", json=wanted)


@pytest.mark.parametrize("kind", ["plain", "small pool", "chunks of 7"])
async def test_embedded_prompts_continue_as_their_tokens_do(
    kind: str, stack_of: Callable[[str], Stack], tiny_model: TinyModel
) -> None:
    prompts = PROMPTS[:8]
    files = [as_file(embed(tiny_model.model, prompt)) for prompt in prompts]
    stack = stack_of(kind)
    replies = await asyncio.gather(*(complete(stack, body(file)) for file in files))
    outputs = [reply.json()["choices"][0]["token_ids"] for reply in replies]
    assert outputs == [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in prompts]


async def test_cached_blocks_are_those_of_the_same_numbers_only(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prompts = [random_tokens(50, 64), random_tokens(51, 64)]
    files = [as_file(embed(tiny_model.model, prompt)) for prompt in prompts]
    replies = [(await complete(stack, body(file))).json() for file in (files[0], *files)]
    usage = [reply["usage"] for reply in replies]
    assert [u["prompt_tokens"] for u in usage] == [64] * 3
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usage] == [0, 48, 0]
    expected = [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in prompts]
    outputs = [reply["choices"][0]["token_ids"] for reply in replies]
    assert outputs == [expected[0], *expected]


async def test_an_embedded_prompt_over_grpc_has_the_tokens_of_transformers(
    stack: Stack, tiny_model: TinyModel
) -> None:
    wanted = embedded_request(embed(tiny_model.model, PROMPTS[0]), NUM_TOKENS)
    async with connect(stack.grpc) as stub:
        answer = await generate(stub, wanted)
    assert answer.token_ids == greedy(tiny_model.model, PROMPTS[0], NUM_TOKENS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_embeds": as_file(torch.zeros(3, 7))}, "prompt_embeds"),
        ({"prompt_embeds": as_file(torch.zeros(48))}, "prompt_embeds"),
        ({"prompt_embeds": "no base64"}, "prompt_embeds"),
        ({"prompt": "and text"}, "prompt_embeds"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    stack: Stack, changes: dict[str, Any], field: str
) -> None:
    reply = await complete(stack, body(as_file(torch.zeros(3, 48)), **changes))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
