"""Tokens are the same whether keys, values and states are computed, cached, or loaded from the
worker's tier of host memory for offloaded blocks. They do not change if the cache or the tier is
lost or damaged.
"""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.pool.kv_cache_groups import MambaCacheMode
from services.worker.build import build_worker
from services.worker.core.errors import NoTier
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker
from services.worker.options.tier.kv_tier import KVTier
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.settings import WorkerSettings
from tests.parity.parallel.test_services_parity import generate
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    SITUATIONS,
    Situation,
    prompts,
    reference_outputs,
    settings_of,
)
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, serving_replica
from tests.tiny_models import save_tiny_model
from tests.worker.rank_threads import TIMEOUTS, free_port
from tests.worker.serving_worker import ServingWorker

TOGETHER = SITUATIONS["sixteen together"]
PREEMPTED = SITUATIONS["preempted again and again"]


@dataclass(frozen=True)
class Served:
    """A kind of model, and the workers that run it, one in each pipeline stage."""

    kind: str
    workers: list[Worker]

    @property
    def tiers(self) -> list[KVTier]:
        tiers = []
        for worker in self.workers:
            assert isinstance(worker.runner, ModelRunner)
            assert worker.runner.tier is not None
            tiers.append(worker.runner.tier)
        return tiers

    @property
    def num_whole_blocks(self) -> int:
        """The number of tokens in whole blocks of all prompts, without the last token of each
        prompt, which is always computed.
        """
        return sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts())

    @asynccontextmanager
    async def replica(
        self, situation: Situation, *, async_scheduling: bool
    ) -> AsyncIterator[tuple[Replica, Gateway]]:
        """A replica whose workers report a situation's limits, and a gateway's stream to it."""
        workers = []
        for worker in self.workers:
            own = worker.description
            description = replace(
                own,
                num_blocks=min(situation.num_blocks * len(own.groups), own.num_blocks),
                max_num_seqs=situation.max_num_seqs,
                max_num_batched_tokens=situation.max_num_batched_tokens,
            )
            workers.append(ServingWorker(replace(worker, description=description)))
        async with (
            serving_replica(*workers, async_scheduling=async_scheduling) as replica,
            gateway_of(replica) as gateway,
        ):
            yield replica, gateway
            await replica.until_idle()


def settings_for(directory: Path, num_mib: float) -> WorkerSettings:
    """Settings of a worker. The tiers of all workers of its group have `num_mib` in total."""
    return settings_of(directory, kv_offloading_size=num_mib / 1024)


@contextmanager
def built(kind: str, num_stages: int, directory: Path, num_mib: float) -> Iterator[Served]:
    """A model whose workers have tiers of `num_mib` in total."""
    save_tiny_model(directory, kind)
    settings = settings_for(directory, num_mib)
    if num_stages == 1:
        yield Served(kind, [build_worker(settings, kind, lambda: None)])
        return
    port = free_port()

    def join(rank: int) -> tuple[Group, Worker]:
        own = Membership(rank, num_stages, "127.0.0.1", port, num_stages)
        group = Group(own, TIMEOUTS, lambda _: None, lambda: None)
        return group, build_worker(settings, f"stage {rank}", lambda: None, group)

    with ThreadPoolExecutor(num_stages) as threads:
        joined = list(threads.map(join, range(num_stages)))
    try:
        yield Served(kind, [worker for _, worker in joined])
    finally:
        for group, _ in joined:
            group.close()


@pytest.fixture(
    scope="module",
    params=[("llama", 1), ("gemma3", 1), ("bamba", 1), ("qwen3_next", 1), ("gemma3", 2)],
    ids=["full attention", "windows", "mamba states", "delta net states", "windows in two stages"],
)
def model(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A kind of model, and its number of pipeline stages."""
    torch.set_num_threads(1)
    kind, num_stages = request.param
    return kind, num_stages


@pytest.fixture(scope="module")
def served(model: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose tier can store the blocks of all prompts."""
    with built(*model, tmp_path_factory.mktemp(model[0]), 64) as served:
        yield served


@pytest.fixture(params=[False, True], ids=["one step", "two steps in flight"])
def async_scheduling(request: pytest.FixtureRequest, model: tuple[str, int]) -> bool:
    if request.param and model[1] > 1:
        pytest.skip("stages have as many steps in flight as there are stages")
    return bool(request.param)


async def reset(replica: Replica) -> None:
    await replica.until_idle()
    await replica.admin.ResetPrefixCache(
        scheduler_pb2.ResetPrefixCacheRequest(preempt_running=True)
    )


def num_cached(gateway: Gateway) -> int:
    """The number of cached tokens, summed over the prompts that were sent last."""
    handles = range(len(gateway.heard) - len(prompts()), len(gateway.heard))
    return sum(gateway.heard[handle].num_cached_tokens or 0 for handle in handles)


async def test_everything_comes_back_after_a_reset_of_the_prefix_cache(
    served: Served, async_scheduling: bool
) -> None:
    expected = reference_outputs(served.kind)
    async with served.replica(TOGETHER, async_scheduling=async_scheduling) as (replica, gateway):
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) < served.num_whole_blocks
        await reset(replica)
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == served.num_whole_blocks


async def test_everything_comes_back_after_the_loss_of_the_pool(
    served: Served, async_scheduling: bool
) -> None:
    expected = reference_outputs(served.kind)
    async with served.replica(TOGETHER, async_scheduling=async_scheduling) as (replica, gateway):
        assert await generate(gateway, prompts(), GREEDY) == expected
        await replica.until_idle()
        generation = (await replica.pool.stats()).generation
        await replica.pool.stop()
        await replica.pool.start()
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == served.num_whole_blocks
        assert (await replica.pool.stats()).generation > generation


async def test_damage_costs_recomputation_and_nothing_else(
    served: Served, async_scheduling: bool
) -> None:
    """A fifth of the blocks is damaged, or all blocks with two steps in flight."""
    share = 1.0 if async_scheduling else 0.2
    expected = reference_outputs(served.kind)
    async with served.replica(TOGETHER, async_scheduling=async_scheduling) as (replica, gateway):
        assert await generate(gateway, prompts(), GREEDY) == expected
        await reset(replica)
        random = np.random.default_rng(5)
        for tier in served.tiers:  # different blocks in each tier
            memory = tier.memory
            flipped = np.flatnonzero(random.random(len(memory)) < share)
            memory[flipped, random.integers(0, memory.shape[1], len(flipped))] ^= 16
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) < served.num_whole_blocks
        await reset(replica)
        # The run before computed the damaged blocks again and stored them.
        assert await generate(gateway, prompts(), GREEDY) == expected
        assert num_cached(gateway) == served.num_whole_blocks


async def test_preempted_requests_go_on_from_the_tier(
    served: Served, async_scheduling: bool
) -> None:
    async with served.replica(PREEMPTED, async_scheduling=async_scheduling) as (replica, gateway):
        for _ in range(2):
            assert await generate(gateway, prompts(), GREEDY) == reference_outputs(served.kind)
        assert (await replica.stats()).num_preemptions > 0


async def test_a_tier_of_a_few_blocks_replaces_them_and_changes_no_token(
    model: tuple[str, int], tmp_path: Path, async_scheduling: bool
) -> None:
    with built(*model, tmp_path, 0.11) as small:
        assert all(2 < len(tier.memory) < 130 for tier in small.tiers)
        expected = reference_outputs(small.kind)
        async with small.replica(PREEMPTED, async_scheduling=async_scheduling) as (
            replica,
            gateway,
        ):
            for _ in range(2):
                assert await generate(gateway, prompts(), GREEDY) == expected
                await reset(replica)


def test_blocks_have_one_size_where_they_are_offloaded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gemma4_moe")
    settings = settings_for(tmp_path, 64)
    offloaded = build_worker(settings, "offloaded", lambda: None).description.groups
    assert [(group.window, group.block_scale) for group in offloaded] == [(None, 1)]
    settings = replace(settings, kv_offloading_size=None)
    sized = build_worker(settings, "sized", lambda: None).description.groups
    assert [(group.window, group.block_scale) for group in sized] == [(20, 1), (None, 2)]


def test_states_that_are_overwritten_are_not_offloaded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bamba")
    settings = replace(settings_for(tmp_path, 64), mamba_cache_mode=MambaCacheMode.NONE)
    with pytest.raises(NoTier, match="set mamba_cache_mode to align"):
        build_worker(settings, "overwritten", lambda: None)
