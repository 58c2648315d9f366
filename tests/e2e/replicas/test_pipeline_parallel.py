"""Two pipeline stages compute the same tokens, even if a stage is killed or hangs. Offloaded keys
and values survive a reset of the prefix cache, but not the end of a stage.
tests/e2e/models/test_kv_codes.py tests offloading with two ranks.
"""

import asyncio
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.telemetry import names
from tests.e2e.conftest import TinyModel
from tests.e2e.inference import Answer, generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import SERVICES, Stack, wait_for
from tests.e2e.tiny import greedy, save_tokenizer
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.plain_http import http_get, http_post
from tests.tiny_models import edit_config, save_tiny_model

NUM_TOKENS = 100
HIT_AT = 20


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("models") / "deep"
    model = save_tiny_model(directory, num_hidden_layers=5)
    edit_config(directory, max_position_embeddings=2048)
    save_tokenizer(directory)
    return TinyModel(directory, model)


@pytest.fixture(scope="module")
def staged(deep_model: TinyModel, receiver: OtlpReceiver, temporary: Path) -> Iterator[Stack]:
    """All services, with two stages and a host-memory tier for all offloaded blocks."""
    stack = Stack(
        deep_model.directory,
        *("--num-blocks", "1000", "--pipeline-parallel-size", "2"),
        *("--kv-offloading-size", "0.02", "--admin-port", "0"),
        *("--max-num-batched-tokens", "32", "--max-num-seqs", "16"),
        *("--otlp-endpoint", receiver.endpoint, "--trace-sample-ratio", "1"),
        *("--trace-step-sample-ratio", "1"),
        environ={"OTEL_BSP_SCHEDULE_DELAY": "100", "TMPDIR": str(temporary)},
    )
    yield stack
    stack.close()


def pids_of_stages(stack: Stack) -> dict[int, int]:
    pids = stack.pids()
    return {stage: pids[f"worker-{stage}"] for stage in range(2) if f"worker-{stage}" in pids}


async def answers(
    stack: Stack, victim: int | None = None, signum: signal.Signals = signal.SIGKILL
) -> list[Answer]:
    """Four answers. A process `victim`, if given, gets the signal when the first has begun."""
    requests = [request(PROMPTS[i], NUM_TOKENS) for i in range(3)]
    requests.append(request(PROMPTS[3], NUM_TOKENS, seed=2, temperature=1.0))
    hit = None if victim is None else partial(os.kill, victim, signum)
    return await generate_all(stack.grpc, requests, hit, HIT_AT)


def num_loaded(stack: Stack) -> float:
    """The number of blocks that were loaded from the host-memory tier, according to the metrics."""
    text = http_get(f"{stack.url}/metrics").text
    (value,) = re.findall(r'^stepwell_kv_tier_transfers_total{.*"loaded".*} (\S+)$', text, re.M)
    return float(value)


async def answers_after_a_reset(stack: Stack) -> list[Answer]:
    """Answers after a reset of the prefix cache, so that blocks are found only in the tier."""
    loaded = num_loaded(stack)
    assert http_post(f"{stack.admin_url}/reset_prefix_cache").status_code == 200
    again = await answers(stack)
    assert num_loaded(stack) >= loaded + 5
    return again


def attributes(span: ReceivedSpan) -> dict[str, Any]:
    return {a.key: a.value.int_value for a in span.span.attributes}


def test_each_stage_reads_its_layers(staged: Stack) -> None:
    lines = "\n".join(staged.output)
    assert "worker-0" in lines
    assert "layers 0 to 2 of 5: read" in lines
    assert "layers 3 to 4 of 5: read" in lines


CLOCK_NANOS = 5_000_000
"""The maximum difference between the clocks of two processes on a busy machine, in nanoseconds."""


NUM_TRIES = 5
"""The maximum number of tries to see overlapping steps. If the two steps in flight end before
another one is planned, all requests share each step from then on, and steps no longer overlap. On a
busy machine this may happen at the start of a try.
"""


def spans_of_stages(receiver: OtlpReceiver) -> dict[int, dict[int, ReceivedSpan]]:
    """The workers' spans of steps with tokens: for each stage, a map from step numbers to spans."""
    found: dict[int, dict[int, ReceivedSpan]] = defaultdict(dict)
    for span in tuple(receiver.spans):
        if span.name == names.SPAN_WORKER_EXECUTE:
            of = attributes(span)
            assert of[names.ATTR_RANK] == of[names.ATTR_PIPELINE_STAGE]
            if of[names.ATTR_NUM_SCHEDULED_TOKENS]:
                found[of[names.ATTR_PIPELINE_STAGE]][of[names.ATTR_STEP]] = span
    return found


def num_overlapping(first: dict[int, ReceivedSpan], second: dict[int, ReceivedSpan]) -> int:
    """The number of steps that stage 0 begins before stage 1 has ended the step before."""
    overlapping = 0
    for step, span in second.items():
        assert span.parent_id == first[step].parent_id
        (started,) = span.span.events
        # The second stage starts when it has the first stage's output.
        begun = first[step].span.events[0].time_unix_nano
        assert started.time_unix_nano >= begun - CLOCK_NANOS
        following = first.get(step + 1)
        if following is not None:
            overlapping += following.span.events[0].time_unix_nano < span.span.end_time_unix_nano
    return overlapping


async def test_both_stages_compute_at_once_and_spans_show_it(
    staged: Stack, deep_model: TinyModel, receiver: OtlpReceiver
) -> None:
    overlapping = num_steps = 0
    for _ in range(NUM_TRIES):
        served = await answers(staged)
        for answer, prompt in zip(served[:3], PROMPTS, strict=False):
            assert answer.token_ids == greedy(deep_model.model, prompt, NUM_TOKENS)

        def has_come(least: int = num_steps + NUM_TOKENS) -> bool:
            stages = spans_of_stages(receiver)
            return stages[0].keys() == stages[1].keys() and len(stages[0]) > least

        wait_for(has_come)
        stages = spans_of_stages(receiver)
        overlapping, num_steps = num_overlapping(stages[0], stages[1]), len(stages[0])
        if overlapping > 10:
            return
    pytest.fail(f"{overlapping} of {num_steps} steps began before the one before had ended")


@pytest.fixture(scope="module")
def undisturbed(staged: Stack) -> list[Answer]:
    return asyncio.run(answers(staged))


async def test_tokens_are_the_same_from_the_tier(staged: Stack, undisturbed: list[Answer]) -> None:
    again = await answers_after_a_reset(staged)
    assert [a.token_ids for a in again] == [a.token_ids for a in undisturbed]
    for answer, prompt in zip(again, PROMPTS, strict=False):
        assert answer.num_cached_tokens >= (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(("stage", "signum"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
async def test_a_stage_that_dies_or_stops_comes_back_as_a_new_generation(
    stage: int,
    signum: signal.Signals,
    staged: Stack,
    deep_model: TinyModel,
    undisturbed: list[Answer],
) -> None:
    before, num_lines = pids_of_stages(staged), len(staged.output)

    disturbed = await answers(staged, before[stage], signum)

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    for answer, prompt in zip(disturbed[:3], PROMPTS, strict=False):
        assert answer.token_ids == greedy(deep_model.model, prompt, NUM_TOKENS)
    after = pids_of_stages(staged)
    assert after.keys() == {0, 1}
    assert not set(after.values()) & set(before.values())
    lines = "\n".join(staged.output[num_lines:])
    hit = (
        "died: killed by SIGKILL"
        if signum is signal.SIGKILL
        else "is killed: the process was stopped"
    )
    assert f"worker-{stage} {hit}" in lines
    assert f"worker-{1 - stage} died: exit status 1" in lines
    assert f"stepwell worker: rank {stage} has ended" in lines
    assert "requests are computed again" in lines
    # The tier of both stages is lost. The new processes fill and read a new tier.
    again = await answers_after_a_reset(staged)
    assert [a.token_ids for a in again] == [a.token_ids for a in undisturbed]


@pytest.mark.parametrize("service", ["scheduler", "kvpool"])
async def test_stages_stay_in_step_when_their_streams_end(
    service: str, staged: Stack, undisturbed: list[Answer]
) -> None:
    before = pids_of_stages(staged)

    disturbed = await answers(staged, staged.pids()[service])

    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    assert pids_of_stages(staged) == before


def test_running_requests_end_before_everything_stops_in_order(
    staged: Stack, undisturbed: list[Answer], temporary: Path
) -> None:
    """SIGTERM starts a drain: running requests finish before the services end."""
    wait_for(staged.healthy)
    pids, num_lines = staged.pids(), len(staged.output)
    assert len(pids) == len(SERVICES) + 1
    assert len(list(temporary.iterdir())) == 1

    drained = asyncio.run(answers(staged, staged.pid, signal.SIGTERM))

    assert [a.token_ids for a in drained] == [a.token_ids for a in undisturbed]
    assert staged.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert list(temporary.iterdir()) == []
    lines = staged.output[num_lines:]
    stops = [line.split()[-1] for line in lines if "| stopping " in line]
    assert stops[:2] == ["gateway", "scheduler"]
    wrong = ("did not stop", "is killed", "Traceback")
    assert not [line for line in lines if any(word in line for word in wrong)]
