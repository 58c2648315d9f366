"""Two ranks of one scheduler compute the same tokens, even if a rank is killed or hangs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.plain_http import http_post

NUM_TOKENS = 100
HIT_AT = 20


@pytest.fixture(scope="module")
def ranks(tiny_model: TinyModel) -> Iterator[Stack]:
    """A stack (all services) with two ranks. It exports spans only when it stops."""
    flags = ("--num-blocks", "1000", "--tensor-parallel-size", "2")
    stack = Stack(tiny_model.directory, *flags, environ={"OTEL_BSP_SCHEDULE_DELAY": "600000"})
    yield stack
    stack.close()


def pids_of_ranks(stack: Stack) -> dict[int, int]:
    pids = stack.pids()
    return {rank: pids[f"worker-{rank}"] for rank in range(2) if f"worker-{rank}" in pids}


async def answers(
    stack: Stack, victim: int | None = None, signum: signal.Signals = signal.SIGKILL
) -> list[Answer]:
    """Three answers. A process `victim`, if given, gets the signal when the first has begun."""
    requests = [request(PROMPTS[i], NUM_TOKENS) for i in range(2)]
    requests.append(request(PROMPTS[2], NUM_TOKENS, seed=2, temperature=1.0))
    hit = None if victim is None else partial(os.kill, victim, signum)
    return await generate_all(stack.grpc, requests, hit, HIT_AT)


@pytest.fixture(scope="module")
def undisturbed(ranks: Stack) -> list[Answer]:
    return asyncio.run(answers(ranks))


async def test_a_killed_rank_takes_its_group_down_and_streams_go_on(
    ranks: Stack, tiny_model: TinyModel, undisturbed: list[Answer]
) -> None:
    before, num_lines = pids_of_ranks(ranks), len(ranks.output)

    disturbed = await answers(ranks, before[0])

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    for answer, prompt in zip(disturbed[:2], PROMPTS, strict=False):
        assert answer.token_ids == greedy(tiny_model.model, prompt, NUM_TOKENS)
    after = pids_of_ranks(ranks)
    assert after.keys() == {0, 1}
    assert not set(after.values()) & set(before.values())
    lines = "\n".join(ranks.output[num_lines:])
    assert "worker-0 died: killed by SIGKILL" in lines
    assert "worker-1 died: exit status 1" in lines
    assert "stepwell worker: rank 0 has ended" in lines


async def test_a_stopped_rank_is_killed_and_streams_go_on(
    ranks: Stack, undisturbed: list[Answer]
) -> None:
    before, num_lines = pids_of_ranks(ranks), len(ranks.output)

    disturbed = await answers(ranks, before[1], signal.SIGSTOP)

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    assert not set(pids_of_ranks(ranks).values()) & set(before.values())
    lines = "\n".join(ranks.output[num_lines:])
    assert "worker-1 is killed: the process was stopped" in lines
    assert "stepwell worker: rank 1 has ended" in lines


@pytest.mark.parametrize("service", ["scheduler", "kvpool"])
async def test_ranks_stay_in_step_when_their_streams_end(
    service: str, ranks: Stack, undisturbed: list[Answer]
) -> None:
    before = pids_of_ranks(ranks)

    disturbed = await answers(ranks, ranks.pids()[service])

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    assert pids_of_ranks(ranks) == before


def test_all_ranks_stop_on_sigterm_and_no_spans_of_a_last_request_are_lost(ranks: Stack) -> None:
    wait_for(ranks.healthy)
    traced = {"traceparent": f"00-{os.urandom(16).hex()}-00f067aa0ba902b7-01"}
    body = {"prompt": "the", "max_tokens": 5}
    assert http_post(f"{ranks.url}/v1/completions", json=body, headers=traced).is_success
    ranks.terminate()
    assert ranks.wait(15) == 0
    stop = next(n for n, line in enumerate(ranks.output) if "SIGTERM: stopping" in line)
    lines = ranks.output[stop:]
    for rank in range(2):
        assert any(f"| stopping worker-{rank}" in line for line in lines)
    wrong = ("warning", "is killed", "did not stop")
    assert not [line for line in lines if any(word in line for word in wrong)]
