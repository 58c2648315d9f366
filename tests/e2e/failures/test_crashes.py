"""Killing or stopping a service under load delays tokens, but loses and changes none."""

import asyncio
import signal
from functools import partial

import pytest
from transformers import PreTrainedModel

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, embedded_request, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack
from tests.e2e.tiny import embed, greedy

NUM_TOKENS = 150
LONG_TOKENS = 1_500
HIT_AT = 30


async def answers(
    stack: Stack,
    model: PreTrainedModel,
    victim: str | None = None,
    signum: signal.Signals = signal.SIGKILL,
) -> list[Answer]:
    """Two greedy answers, two seeded ones, and a greedy one to a prompt of embeddings. If a service
    `victim` is given, it gets the signal when the first answer has begun.
    """
    requests = [request(PROMPTS[i], NUM_TOKENS) for i in range(2)]
    requests += [
        request(PROMPTS[i], NUM_TOKENS, seed=i, temperature=1.0, frequency_penalty=0.2)
        for i in range(2, 4)
    ]
    requests.append(embedded_request(embed(model, PROMPTS[4]), NUM_TOKENS))
    hit = None if victim is None else partial(stack.hit, victim, signum)
    return await generate_all(stack.grpc, requests, hit, HIT_AT)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, tiny_model: TinyModel) -> list[Answer]:
    return asyncio.run(answers(stack, tiny_model.model))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("service", ["worker", "kvpool", "scheduler"])
async def test_streams_go_on_when_a_service_is(
    service: str,
    signum: signal.Signals,
    stack: Stack,
    tiny_model: TinyModel,
    undisturbed: list[Answer],
) -> None:
    pid, num_lines = stack.pids()[service], len(stack.output)

    disturbed = await answers(stack, tiny_model.model, service, signum)

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    assert [a.text for a in disturbed] == [a.text for a in undisturbed]
    for i in (0, 4):
        assert disturbed[i].token_ids == greedy(tiny_model.model, PROMPTS[i], NUM_TOKENS)
    stack.wait_until_back(service, pid)
    lines = "\n".join(stack.output[num_lines:])
    assert (f"{service} is killed: the process was stopped" in lines) is (signum == signal.SIGSTOP)
    assert f"{service} died: killed by SIGKILL" in lines
    stack.wait_until_nothing_is_held()


async def test_a_killed_gateway_comes_back_and_its_requests_are_aborted(stack: Stack) -> None:
    """The answers are so long that this process cannot have received them all when it reads the
    thirtieth token, even if it is starved.
    """
    pid = stack.pids()["gateway"]
    requests = [request(prompt, LONG_TOKENS) for prompt in PROMPTS[:4]]

    with pytest.raises(Exception):  # noqa: B017, PT011 - Whatever the transport calls it.
        await generate_all(stack.grpc, requests, partial(stack.hit, "gateway"), HIT_AT)

    stack.wait_until_back("gateway", pid)
    stack.wait_until_nothing_is_held()
