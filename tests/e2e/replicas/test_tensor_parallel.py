"""Two ranks of one scheduler compute the same tokens, even if a rank is killed or hangs. They use a
draft model. tests/e2e/models/test_kv_codes.py tests two ranks without drafts.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy
from tests.parity.draft_models import save_perturbed
from tests.plain_http import http_get, http_post

NUM_TOKENS = 100
NUM_DRAFTS = 4
HIT_AT = 20


@pytest.fixture(scope="module")
def ranks(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack (all services) with two ranks and a draft model. It exports spans only when it stops.
    The KV cache fits the tests' requests, but not the cached blocks of several rounds.
    """
    draft: Path = save_perturbed(tiny_model.directory, tmp_path_factory.mktemp("draft") / "model")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    flags = ("--num-blocks", "60", "--max-model-len", "512", "--tensor-parallel-size", "2")
    drafts = ("--speculative-config", json.dumps(config))
    environ = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    stack = Stack(tiny_model.directory, *flags, *drafts, environ=environ)
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


def wait_for_new_ranks(stack: Stack, before: dict[int, int]) -> None:
    """Waits until both ranks are processes that were not running `before`."""

    def are_new() -> bool:
        now = pids_of_ranks(stack)
        return now.keys() == {0, 1} and not set(now.values()) & set(before.values())

    wait_for(are_new)


def count(stack: Stack, name: str) -> float:
    """The current value of a counter of drafts, according to the gateway's metrics."""
    pattern = rf"^vllm:spec_decode_{name}_total{{(?![^}}]*position)[^}}]*}} (\S+)$"
    return sum(map(float, re.findall(pattern, http_get(f"{stack.url}/metrics").text, re.M)))


async def test_a_draft_model_changes_no_token(ranks: Stack, tiny_model: TinyModel) -> None:
    for _ in range(2):  # the second round has prefix hits
        for answer, prompt in zip((await answers(ranks))[:2], PROMPTS, strict=False):
            assert answer.token_ids == greedy(tiny_model.model, prompt, NUM_TOKENS)
    drafted, accepted = count(ranks, "num_draft_tokens"), count(ranks, "num_accepted_tokens")
    assert 0.2 * drafted < accepted < drafted


async def test_a_killed_rank_takes_its_group_down_and_streams_go_on(
    ranks: Stack, tiny_model: TinyModel, undisturbed: list[Answer]
) -> None:
    before, num_lines = pids_of_ranks(ranks), len(ranks.output)

    disturbed = await answers(ranks, before[0])

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    for answer, prompt in zip(disturbed[:2], PROMPTS, strict=False):
        assert answer.token_ids == greedy(tiny_model.model, prompt, NUM_TOKENS)
    wait_for_new_ranks(ranks, before)
    lines = "\n".join(ranks.output[num_lines:])
    assert "worker-0 died: killed by SIGKILL" in lines
    assert "worker-1 died: exit status 1" in lines
    assert "stepwell worker: rank 0 has ended" in lines
    accepted = count(ranks, "num_accepted_tokens")
    assert [a.token_ids for a in await answers(ranks)] == [a.token_ids for a in undisturbed]
    # The gateway's metrics may lack a replica whose scheduler answers too slowly.
    wait_for(lambda: count(ranks, "num_accepted_tokens") > accepted)


async def test_a_stopped_rank_is_killed_and_streams_go_on(
    ranks: Stack, undisturbed: list[Answer]
) -> None:
    before, num_lines = pids_of_ranks(ranks), len(ranks.output)

    disturbed = await answers(ranks, before[1], signal.SIGSTOP)

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    wait_for_new_ranks(ranks, before)
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
