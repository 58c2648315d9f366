"""Batches, chunks, prefix hits and preemptions do not change tokens. Greedy answers equal
transformers'. Seeded answers equal the answers to the same requests sent alone.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.e2e.conftest import FLAGS, TinyModel
from tests.e2e.inference import connect, generate, request
from tests.e2e.prompts import PROMPTS, SHARED_PREFIX, random_tokens
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy

NUM_TOKENS = 40
SAMPLING = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 100,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
}

StackOf = Callable[[str], Stack]


@pytest.fixture(scope="module")
def expected(tiny_model: TinyModel) -> list[list[int]]:
    return [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", FLAGS)
async def test_greedy_answers_are_those_of_transformers(
    kind: str, stack_of: StackOf, expected: list[list[int]]
) -> None:
    stack = stack_of(kind)
    async with connect(stack.grpc) as stub:
        alone = await generate(stub, request(PROMPTS[0], NUM_TOKENS))
        together = await asyncio.gather(
            *(generate(stub, request(prompt, NUM_TOKENS)) for prompt in PROMPTS)
        )

    assert alone.token_ids == expected[0]
    assert [answer.token_ids for answer in together] == expected
    # The first request cached the common prefix of 70 tokens, which fills four blocks.
    assert max(answer.num_cached_tokens for answer in together) >= 64


@pytest.mark.parametrize("kind", FLAGS)
async def test_seeded_answers_depend_on_the_request_alone(
    kind: str, stack_of: StackOf, stack: Stack
) -> None:
    requests = [
        request(prompt, NUM_TOKENS, seed=100 + i, **SAMPLING) for i, prompt in enumerate(PROMPTS)
    ]
    async with connect(stack.grpc) as stub:
        alone = [await generate(stub, wanted) for wanted in requests[:4]]
    async with connect(stack_of(kind).grpc) as stub:
        together = await asyncio.gather(*(generate(stub, wanted) for wanted in requests))

    assert [a.token_ids for a in together[:4]] == [a.token_ids for a in alone]
    assert alone[0].token_ids != alone[1].token_ids


async def test_the_small_pool_preempts_again_and_again(
    stack_of: StackOf, expected: list[list[int]]
) -> None:
    stack = stack_of("small pool")
    before = stack.status()["num_preemptions"]
    async with connect(stack.grpc) as stub:
        answers = await asyncio.gather(
            *(generate(stub, request(prompt, NUM_TOKENS)) for prompt in PROMPTS)
        )

    assert [answer.token_ids for answer in answers] == expected
    # The gateway's status counts preemptions only some time after the tokens arrived.
    wait_for(lambda: stack.status()["num_preemptions"] - before >= 5, 10)
    stack.wait_until_nothing_is_held(10)


async def test_a_second_turn_finds_the_first_one_cached(
    stack: Stack, tiny_model: TinyModel
) -> None:
    prompt = SHARED_PREFIX[::-1]
    async with connect(stack.grpc) as stub:
        first = await generate(stub, request(prompt, 50))
        turn = prompt + first.token_ids + random_tokens(7, 9)
        second = await generate(stub, request(turn, 20))

    assert first.num_cached_tokens == 0
    # 119 of the 120 tokens were computed. They fill 7 blocks of 16 tokens, which are cached.
    assert second.num_cached_tokens == 112
    assert second.token_ids == greedy(tiny_model.model, turn, 20)
