"""Tokens do not depend on the schedule: with one step in flight or two, in chunks, with prefix
hits, and with so few blocks that requests are preempted repeatedly. Pool, worker and scheduler
serve at ports of their own, and exchange the same messages as separate processes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stepwell.scheduler.v1 import scheduler_pb2

from services.worker.core.worker import Worker
from tests.parity.situations import (
    GREEDY,
    SAMPLED,
    SITUATIONS,
    SMALL_POOL,
    Situation,
    build,
    prompts,
    reference_outputs,
)
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, sampling, serving_replica
from tests.tiny_models import CACHES, save_tiny_model
from tests.worker.serving_worker import ServingWorker

Outputs = list[list[int]]


@dataclass(frozen=True)
class Served:
    """A worker, transformers' greedy answers, and sampled answers to prompts sent together."""

    kind: str
    loaded: Worker
    greedy: Outputs
    sampled: Outputs


@pytest.fixture(scope="module", params=CACHES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One kind of model for each kind of cache. tests/parity/test_greedy_parity.py tests all kinds
    of models without the services.
    """
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, request.param)
    loaded, greedy = build(directory), reference_outputs(request.param)
    sampled = answers_together(loaded, SAMPLED)
    assert sampled != greedy
    assert len({token for output in sampled for token in output}) > 50
    return Served(request.param, loaded, greedy, sampled)


@asynccontextmanager
async def serving(
    loaded: Worker, situation: Situation, *, async_scheduling: bool, **settings: Any
) -> AsyncIterator[tuple[Replica, Gateway]]:
    """Runs a replica whose worker has a situation's limits. Opens a gateway's session (stream)."""
    groups, most = len(loaded.description.groups), loaded.description.num_blocks
    description = replace(
        loaded.description,
        num_blocks=min(situation.num_blocks * groups, most),
        max_num_seqs=situation.max_num_seqs,
        max_num_batched_tokens=situation.max_num_batched_tokens,
    )
    async with (
        serving_replica(
            ServingWorker(replace(loaded, description=description)),
            async_scheduling=async_scheduling,
            **settings,
        ) as replica,
        gateway_of(replica) as gateway,
    ):
        yield replica, gateway


async def generate(gateway: Gateway, wanted: list[list[int]], params: dict[str, Any]) -> Outputs:
    first = len(gateway.heard)
    handles = range(first, first + len(wanted))
    for handle, prompt in zip(handles, wanted, strict=True):
        await gateway.add(handle, prompt, sampling=sampling(**params))
    await gateway.finish(*handles)
    return [gateway.heard[handle].tokens for handle in handles]


def answers_together(worker: Worker, params: dict[str, Any]) -> Outputs:
    """The answers to all prompts, sent to one worker at the same time."""

    async def answers() -> Outputs:
        situation = SITUATIONS["sixteen together"]
        async with serving(worker, situation, async_scheduling=True) as (_, gateway):
            return await generate(gateway, prompts(), params)

    return asyncio.run(answers())


@pytest.mark.parametrize("is_preempted", [False, True], ids=["others", "preempted"])
async def test_asynchronous_scheduling_changes_no_token(
    served: Served, *, is_preempted: bool
) -> None:
    """With preemptions, where the schedules differ most, one step in flight is tested, too. Of the
    situations without preemptions, each kind of model is served in one.
    """
    calm = ("sixteen together", "chunks of 11")[CACHES.index(served.kind) % 2]
    situation = SITUATIONS["preempted again and again" if is_preempted else calm]
    for async_scheduling in (False, True) if is_preempted else (True,):
        async with serving(served.loaded, situation, async_scheduling=async_scheduling) as (
            replica,
            gateway,
        ):
            assert await generate(gateway, prompts(), GREEDY) == served.greedy
            assert await generate(gateway, prompts(), SAMPLED) == served.sampled
            stats = await replica.stats()
            await replica.until_idle()
        check_stats(stats, situation)


def check_stats(stats: scheduler_pb2.GetStatsResponse, situation: Situation) -> None:
    """Asserts that the replica's statistics show the events of the situation."""
    assert stats.num_finished == 2 * len(prompts())
    assert stats.num_cached_tokens >= 200
    if situation.num_blocks == SMALL_POOL:
        assert stats.num_preemptions >= 1
    else:
        assert stats.num_preemptions == 0


async def test_alone_to_the_last_token_and_to_a_stop_token(served: Served) -> None:
    """One kind of model is also served with one step in flight."""
    alone = SITUATIONS["alone"]
    expected = alone.chosen(served.greedy)
    wanted = alone.chosen(prompts())
    stop_token_id = expected[-1][10]
    end = expected[-1].index(stop_token_id) + 1
    num_steps: dict[bool, int] = {}
    for async_scheduling in (False, True) if served.kind == "llama" else (True,):
        async with serving(served.loaded, alone, async_scheduling=async_scheduling) as (
            replica,
            gateway,
        ):
            assert await generate(gateway, wanted, GREEDY) == expected
            assert await generate(gateway, wanted, SAMPLED) == alone.chosen(served.sampled)
            stopping = {**GREEDY, "stop_token_ids": [stop_token_id]}
            assert await generate(gateway, wanted[-1:], stopping) == [expected[-1][:end]]
            await replica.until_idle()
            stats = await replica.stats()
        assert stats.num_cached_tokens > 0
        num_steps[async_scheduling] = stats.num_steps
    # With two steps in flight, the scheduler learns the end of a request one step later.
    assert num_steps[True] > num_steps.get(False, 0)
