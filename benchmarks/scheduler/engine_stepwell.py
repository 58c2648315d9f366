"""Measures Stepwell's scheduler and pool core in one process, with `benchmarks.scheduler.loads`."""

import asyncio
import time
from collections.abc import Sequence

from benchmarks.scheduler.loads import (
    BLOCK_COUNTS,
    BLOCK_SIZE,
    CONTEXT,
    PROMPT,
    REPEATS,
    SIZES,
    STEPS,
    Figures,
    context_tokens,
    long_prompt,
    median_micros,
    median_step_micros,
    pool_figures,
    prefix_figures,
    step_name,
    time_repeats,
)
from services.common.pool.block_hash import BlockHash, hash_full_blocks
from services.common.pool.ids import RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import Admission, Admit, Lookup, Release
from services.common.request.sampling import SamplingParams
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.policies import PROGRAM
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool

_CONTEXT_BLOCKS = 16
"""KV blocks of a paused program's context (the tokens with which its next request begins)."""
_STEP_SECONDS = 0.02
"""How far each step advances the scheduler's clock, which determines the age of paused contexts."""
_SPARE_BLOCKS = 1500
"""The number of free blocks beside the contexts of paused programs. They are enough to admit all
requests, but so few that the policy ranks the contexts for eviction.
"""


def measure_programs(num_programs: int) -> Figures:
    """Measures steps with the policy `program`, first without and then with `num_programs` paused
    programs. Their contexts fill the pool, so that running requests evict their blocks.
    """
    return {
        f"step, {num_running} running, {count} paused programs": asyncio.run(
            _step_micros(num_running, async_scheduling=True, policy=PROGRAM, num_paused=count)
        )
        for num_running in SIZES
        for count in (0, num_programs)
    }


def measure() -> Figures:
    """Measures every figure once, in processor microseconds."""
    figures: Figures = {}
    for num_running in SIZES:
        for asynchronous in (False, True):
            figures[step_name(num_running, async_scheduling=asynchronous)] = asyncio.run(
                _step_micros(num_running, async_scheduling=asynchronous)
            )
    tokens = long_prompt()
    hashing = time_repeats(lambda: hash_full_blocks(b"root", tokens, BLOCK_SIZE))
    figures |= prefix_figures(hashing, _full_hit_micros(tokens))
    for count in BLOCK_COUNTS:
        figures |= _pool_micros(count)
    return figures


async def _step_micros(
    num_running: int, *, async_scheduling: bool, policy: str = "fcfs", num_paused: int = 0
) -> float:
    num_blocks = num_running * (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 64
    if num_paused:
        running_blocks = num_running * (CONTEXT + num_paused // 4) // BLOCK_SIZE
        num_blocks = running_blocks + num_paused * _CONTEXT_BLOCKS + _SPARE_BLOCKS
    config = SchedulerConfig(
        max_num_seqs=num_running + num_paused,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        async_scheduling=async_scheduling,
        policy=policy,
    )
    num_steps = 0
    scheduler = Scheduler(config, InProcessPool(config), clock=lambda: num_steps * _STEP_SECONDS)
    for number in range(num_running):
        scheduler.add(_request(number))
    for number in range(num_running, num_running + num_paused):
        scheduler.add(_request(number, _CONTEXT_BLOCKS * BLOCK_SIZE, max_tokens=1))
    while scheduler.queues.waiting or any(
        request.is_prefill_chunk for request in scheduler.running
    ):
        plan = await scheduler.schedule()
        scheduler.update_from_output(plan, _sampled(plan))
    one_token_each = ModelRunnerOutput([[5]] * num_running)
    taken: list[int] = []
    ahead: SchedulerOutput | None = None
    for num_steps in range(STEPS):  # noqa: B007 - the clock reads it
        begun = time.thread_time_ns()
        plan = await scheduler.schedule()
        done, ahead = (ahead, plan) if async_scheduling else (plan, None)
        if done is not None:
            scheduler.update_from_output(done, one_token_each)
        taken.append(time.thread_time_ns() - begun)
    return median_step_micros(taken)


def _request(number: int, num_tokens: int | None = None, max_tokens: int = 100_000) -> Request:
    tokens = context_tokens(number)[:num_tokens]
    return Request(
        request_id=str(number),
        key=RequestKey(number + 1),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, eos_token_ids=(2,)),
    )


def _sampled(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput([[] if request.is_prefill_chunk else [5] for request in plan.requests])


def _full_hit_micros(tokens: list[int]) -> float:
    hashes = hash_full_blocks(b"root", tokens, BLOCK_SIZE)
    pool = KVPool(
        PoolConfig(
            num_blocks=16 * (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 2048,
            groups=(KVCacheGroup(AttentionType.FULL, BLOCK_SIZE),),
        )
    )
    hit = (PROMPT - 1) // BLOCK_SIZE * BLOCK_SIZE
    pool.transact([_admit(1, 0, hashes)])
    taken: list[int] = []
    for number in range(2, 2 + REPEATS):
        request = RequestKey(number)
        begun = time.thread_time_ns()
        pool.transact([Lookup([request], [PROMPT - 1], [hashes])])
        pool.transact([_admit(number, hit, ())])
        taken.append(time.thread_time_ns() - begun)
        pool.transact([Release([request])])
    return median_micros(taken)


def _admit(number: int, hit: int, hashes: Sequence[BlockHash]) -> Admit:
    return Admit(
        [
            Admission(
                request=RequestKey(number),
                max_hit_tokens=PROMPT - 1,
                num_hit_tokens=hit,
                num_slots=PROMPT,
                num_commit_tokens=PROMPT,
                num_reserve_slots=PROMPT,
                new_hashes=hashes,
            )
        ]
    )


def _pool_micros(count: int) -> Figures:
    pool = BlockPool(4096, 1)
    get: list[int] = []
    free: list[int] = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        blocks = pool.get_new_blocks(count)
        got = time.thread_time_ns()
        pool.free(blocks, 0)
        free.append(time.thread_time_ns() - got)
        get.append(got - begun)
    return pool_figures(count, get, free, _eviction_nanos(count))


def _eviction_nanos(count: int) -> list[int]:
    pool = BlockPool(count + 1, 1)
    taken: list[int] = []
    for turn in range(REPEATS):
        begun = time.thread_time_ns()
        blocks = pool.get_new_blocks(count)
        if turn:
            taken.append(time.thread_time_ns() - begun)
        pool.publish(0, [BlockHash(b"%d %d" % (turn, block)) for block in blocks], blocks)
        pool.free(blocks, count)
        pool.take_events()
    return taken
