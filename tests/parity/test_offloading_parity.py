"""The same tokens whether keys and values are computed, cached, or loaded from the tier beside the
worker; and whatever happens to pool and tier.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from stepwell.scheduler.v1 import scheduler_pb2

from services.worker.build import build_worker
from services.worker.core.kv_tier import KVTier
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker
from services.worker.settings import WorkerSettings
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    LARGE_POOL,
    MAX_MODEL_LEN,
    SITUATIONS,
    Situation,
    prompts,
    reference_outputs,
)
from tests.parity.test_services_parity import generate, serving
from tests.scheduler.serving_replica import Gateway, Replica
from tests.tiny_models import save_tiny_model

MIB = 2**20
TOGETHER = SITUATIONS["sixteen together"]
PREEMPTED = SITUATIONS["preempted again and again"]


def build(kind: str, directory: Path, num_mib: float) -> Worker:
    save_tiny_model(directory, kind)
    settings = WorkerSettings(
        model=directory,
        block_size=BLOCK_SIZE,
        num_blocks=LARGE_POOL,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_offloading_size=num_mib / 1024,
    )
    return build_worker(settings, kind, lambda: None)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    """One with full attention, one with windows beside it."""
    torch.set_num_threads(1)
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """With a tier that holds everything."""
    return build(kind, tmp_path_factory.mktemp(kind), 64)


@pytest.fixture(params=[False, True], ids=["one step", "two steps in flight"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tier_of(worker: Worker) -> KVTier:
    assert isinstance(worker.runner, ModelRunner)
    assert worker.runner.tier is not None
    return worker.runner.tier


@asynccontextmanager
async def replica_of(
    loaded: Worker, situation: Situation, *, async_scheduling: bool
) -> AsyncIterator[tuple[Replica, Gateway]]:
    async with serving(loaded, situation, async_scheduling=async_scheduling) as both:
        yield both
        await both[0].until_idle()


async def reset(replica: Replica) -> None:
    """Empties the prefix cache."""
    await replica.until_idle()
    await replica.admin.ResetPrefixCache(
        scheduler_pb2.ResetPrefixCacheRequest(preempt_running=True)
    )


def num_cached(gateway: Gateway) -> int:
    """Cached tokens of the prompts that were sent last."""
    handles = range(len(gateway.heard) - len(prompts()), len(gateway.heard))
    return sum(gateway.heard[handle].num_cached_tokens or 0 for handle in handles)


def num_whole_blocks() -> int:
    """Tokens of whole blocks of all prompts, one token left to compute."""
    return sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts())


async def test_everything_comes_back_after_a_reset_of_the_prefix_cache(
    kind: str, loaded: Worker, async_scheduling: bool
) -> None:
    expected = reference_outputs(kind)
    async with replica_of(loaded, TOGETHER, async_scheduling=async_scheduling) as (
        replica,
        gateway,
    ):
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) < num_whole_blocks()
        await reset(replica)
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == num_whole_blocks()


async def test_everything_comes_back_after_the_loss_of_the_pool(
    kind: str, loaded: Worker, async_scheduling: bool
) -> None:
    expected = reference_outputs(kind)
    async with replica_of(loaded, TOGETHER, async_scheduling=async_scheduling) as (
        replica,
        gateway,
    ):
        assert await generate(gateway, prompts(), GREEDY) == expected
        await replica.until_idle()
        generation = (await replica.pool.stats()).generation
        await replica.pool.stop()
        await replica.pool.start()
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == num_whole_blocks()
        assert (await replica.pool.stats()).generation > generation


@pytest.mark.parametrize("share", [0.2, 1.0])
async def test_damage_costs_recomputation_and_nothing_else(
    kind: str, loaded: Worker, async_scheduling: bool, share: float
) -> None:
    expected = reference_outputs(kind)
    async with replica_of(loaded, TOGETHER, async_scheduling=async_scheduling) as (
        replica,
        gateway,
    ):
        assert await generate(gateway, prompts(), GREEDY) == expected
        await reset(replica)
        memory, random = tier_of(loaded).memory, np.random.default_rng(5)
        flipped = np.flatnonzero(random.random(len(memory)) < share)
        memory[flipped, random.integers(0, memory.shape[1], len(flipped))] ^= 16
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) < num_whole_blocks()
        await reset(replica)
        # What was damaged was computed again, and stored again.
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == num_whole_blocks()


async def test_preempted_requests_go_on_from_the_tier(
    kind: str, loaded: Worker, async_scheduling: bool
) -> None:
    async with replica_of(loaded, PREEMPTED, async_scheduling=async_scheduling) as (
        replica,
        gateway,
    ):
        for _ in range(3):
            assert await generate(gateway, prompts(), GREEDY) == reference_outputs(kind)
        assert (await replica.stats()).num_preemptions > 0


async def test_a_tier_of_a_few_blocks_replaces_them_and_changes_no_token(
    kind: str, tmp_path: Path, async_scheduling: bool
) -> None:
    small = build(kind, tmp_path, 0.11)
    assert 2 < len(tier_of(small).memory) < 130
    async with replica_of(small, PREEMPTED, async_scheduling=async_scheduling) as (
        replica,
        gateway,
    ):
        for _ in range(3):
            assert await generate(gateway, prompts(), GREEDY) == reference_outputs(kind)
            await reset(replica)
