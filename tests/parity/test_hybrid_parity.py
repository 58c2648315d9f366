"""Greedy output of models with recurrent layers equals transformers', however the recurrent states
are stored and shared in KV-cache blocks. Scheduler, pool and model runner are real.
parallel/test_services_parity.py tests the default settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stepwell.common.v1 import common_pb2
from transformers import PreTrainedModel

from services.common.pool.kv_cache_groups import MambaCacheMode
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request as ScheduledRequest
from services.worker.build import build_worker
from services.worker.core.model_runner import ModelRunner
from services.worker.settings import WorkerSettings
from tests.parity.oracle import first_choices
from tests.parity.scheduled import Run, generate
from tests.parity.situations import BLOCK_SIZE, GREEDY, LARGE_POOL, MAX_TOKENS, SITUATIONS
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.runner_driver import build_runner
from tests.worker.serving_worker import ServingWorker

KINDS = ["bamba", "qwen3_next"]
NUM_TURNS_ALONE = 6
"""How many turns (prompts) are served in the situation `alone`. They include repeated prompts, and
prompts that end inside a block.
"""
PREEMPTED = replace(SITUATIONS["preempted again and again"], num_blocks=28)
"""A situation with blocks for two or three turns, which are few because states need few."""
HYBRID_SITUATIONS = {**SITUATIONS, "preempted again and again": PREEMPTED}


@dataclass(frozen=True)
class Served:
    """A model's directory, and the model loaded by transformers."""

    directory: Path
    model: PreTrainedModel

    def runner(self, mode: MambaCacheMode = MambaCacheMode.ALIGN) -> ModelRunner:
        return build_runner(
            self.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL, mamba_cache_mode=mode
        )

    def assert_parity(self, given: list[list[int]], run: Run) -> None:
        for number, (prompt, output) in enumerate(zip(given, run.outputs, strict=True)):
            assert output == first_choices(self.model, prompt, output), f"request {number}"


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    return Served(directory, save_tiny_model(directory, request.param))


def turns() -> list[list[int]]:
    """Prompts that repeat two sequences, with more or fewer tokens. Two end inside a block."""
    random = np.random.default_rng(5)
    first, second = (random.integers(3, VOCAB_SIZE, length).tolist() for length in (27, 39))
    return [
        *(first, second, [*first, 7, 8, 9], first, second),
        *(second + first[:6], first + second[:9], [*first[:26], 5, 6], first, second),
        *(first + second, [*second, 11], [*first, 7, 8, 9, 4, 4, 4], second[:38] + first),
    ]


async def serve(served: Served, name: str, runner: ModelRunner, **changes: Any) -> list[Run]:
    """Serves the turns with two steps in flight, and asserts that the tokens are the expected ones.
    The situation with preemptions also runs with one step in flight.
    """
    greedy, runs = common_pb2.SamplingParams(**GREEDY), []
    given = turns()[:NUM_TURNS_ALONE] if name == "alone" else turns()
    for async_scheduling in (False, True) if name == "preempted again and again" else (True,):
        runs.append(
            await generate(
                runner,
                HYBRID_SITUATIONS[name],
                greedy,
                async_scheduling=async_scheduling,
                given=given,
                **changes,
            )
        )
        served.assert_parity(given, runs[-1])
        assert (runs[-1].num_preemptions > 0) == (HYBRID_SITUATIONS[name] is PREEMPTED)
    return runs


@pytest.mark.parametrize("name", HYBRID_SITUATIONS)
async def test_a_hit_inside_a_block_goes_on_in_a_copy_of_the_state(
    served: Served, name: str
) -> None:
    runner = served.runner()
    whole = await serve(served, name, runner)
    inside = await serve(served, name, runner, prefix_match_unit=BLOCK_SIZE // 2)
    for at_ends, anywhere in zip(whole, inside, strict=True):
        assert at_ends.num_copies == 0
        assert anywhere.num_copies > 0
        assert min(anywhere.num_cached_tokens, at_ends.num_cached_tokens) > 0
        if not at_ends.num_preemptions:  # otherwise the two runs may evict different blocks
            assert anywhere.num_cached_tokens > at_ends.num_cached_tokens


@pytest.mark.parametrize("name", HYBRID_SITUATIONS)
async def test_a_state_that_each_step_overwrites(served: Served, name: str) -> None:
    runner = served.runner(MambaCacheMode.NONE)
    for run in await serve(served, name, runner, enable_prefix_caching=False):
        assert run.num_cached_tokens == 0


class Disturbance:
    """At random steps, aborts a request or preempts all running requests."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(2)
        self.num_aborted = self.num_preempted = 0

    def __call__(self, scheduler: Scheduler, requests: Sequence[ScheduledRequest]) -> None:
        left = [request for request in requests if not request.is_finished]
        if left and self.random.random() < 0.15:
            scheduler.abort(left[self.random.integers(len(left))])
            self.num_aborted += 1
        if self.random.random() < 0.15:
            self.num_preempted += len(scheduler.preempt_all())


@pytest.mark.parametrize("unit", [BLOCK_SIZE, BLOCK_SIZE // 2])
async def test_aborts_and_preemptions_leave_the_others_as_they_are(
    served: Served, unit: int
) -> None:
    disturb, given = Disturbance(), turns()
    run = await generate(
        served.runner(),
        PREEMPTED,
        common_pb2.SamplingParams(**GREEDY),
        async_scheduling=True,
        given=given,
        disturb=disturb,
        prefix_match_unit=unit,
    )
    served.assert_parity(given, run)
    assert disturb.num_aborted >= 2
    assert disturb.num_preempted >= 5
    assert sum(len(output) == MAX_TOKENS for output in run.outputs) >= len(given) // 2


async def test_retention_keeps_states_where_prompts_end_and_part(served: Served) -> None:
    runner = served.runner()
    for run in await serve(served, "sixteen together", runner, prefix_cache_retention_interval=0):
        assert run.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("mode", "setting", "cached"),
    [
        # A hit of the 27 tokens has whole units of 2 tokens, so it ends inside the seventh block.
        (MambaCacheMode.ALIGN, {"prefix_match_unit": 2}, [0, 26, 26]),
        (MambaCacheMode.ALIGN, {}, [0, 24, 24]),
        (MambaCacheMode.NONE, {"enable_prefix_caching": False}, [0, 0, 0]),
    ],
    ids=["inside a block", "at the end of a block", "none"],
)
async def test_hits_over_the_services(
    served: Served, mode: MambaCacheMode, setting: dict[str, Any], cached: list[int]
) -> None:
    settings = WorkerSettings(
        model=served.directory,
        block_size=BLOCK_SIZE,
        max_model_len=128,
        max_num_seqs=8,
        mamba_cache_mode=mode,
    )
    worker = ServingWorker(build_worker(settings, "hybrid", lambda: None))
    first = turns()[0]
    given = [first, [*first, 7, 8, 9], first]
    async with serving_replica(worker, **setting) as replica, gateway_of(replica) as gateway:
        assert gateway.opened is not None
        assert gateway.opened.block_size == BLOCK_SIZE
        for handle, prompt in enumerate(given):
            await gateway.add(handle, prompt, sampling=sampling(**GREEDY))
            await gateway.finish(handle)
        await replica.until_idle()
    for handle, prompt in enumerate(given):
        output = gateway.heard[handle].tokens
        assert output == first_choices(served.model, prompt, output)
    assert [gateway.heard[handle].num_cached_tokens for handle in range(3)] == cached
