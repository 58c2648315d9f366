"""Measures vLLM's scheduler and KV-cache manager under the loads of `benchmarks.scheduler.loads`.

`benchmarks.scheduler` starts this program in a separate interpreter that has vLLM. The last line of
the program's output contains the figures as JSON.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

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

hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


def main() -> None:
    init_none_hash(sha256)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as directory:
        for num_running in SIZES:
            for asynchronous in (False, True):
                scheduler = make_scheduler(directory, num_running, asynchronous)
                figures[step_name(num_running, async_scheduling=asynchronous)] = step_micros(
                    scheduler, num_running, asynchronous
                )
        figures |= prefix_micros(make_scheduler(directory, 16, False))
    for count in BLOCK_COUNTS:
        figures |= pool_micros(count)
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


def make_scheduler(directory: str, num_running: int, asynchronous: bool) -> Scheduler:
    """A scheduler with a pool that has room for the load."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 16384,
        "torch_dtype": "float32",
    }
    (Path(directory) / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=16384
    )
    scheduling = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=16384,
        max_model_len=16384,
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    num_blocks = num_running * (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 2048
    cache.num_gpu_blocks = num_blocks
    vllm_config = VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),  # not used, since nothing runs on a device
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    kind = AsyncScheduler if asynchronous else Scheduler
    return kind(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def make_request(name: str, tokens: list[int]) -> Request:
    """A request that runs longer than the measurement."""
    sampling = SamplingParams(max_tokens=10_000, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher,
    )


def answer(scheduled: Any, requests: dict[str, Request]) -> ModelRunnerOutput:
    """The model runner's output of a step: one token for each request whose prompt is computed."""
    names = list(scheduled.num_scheduled_tokens)
    tokens = [
        [5] if requests[name].num_computed_tokens >= requests[name].num_prompt_tokens else []
        for name in names
    ]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=tokens,
    )


def step_micros(scheduler: Scheduler, num_running: int, asynchronous: bool) -> float:
    """The median time of schedule() and update_from_output() together in steady decode."""
    requests = {}
    for number in range(num_running):
        requests[str(number)] = make_request(str(number), context_tokens(number))
        scheduler.add_request(requests[str(number)])
    while scheduler.waiting or any(
        request.num_computed_tokens < request.num_prompt_tokens for request in requests.values()
    ):
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer(scheduled, requests))
    taken, ahead = [], None
    for _ in range(STEPS):
        begun = time.thread_time_ns()
        scheduled = scheduler.schedule()
        planned = time.thread_time_ns()
        done, ahead = (ahead, scheduled) if asynchronous else (scheduled, None)
        output = answer(done, requests) if done is not None else None
        resumed = time.thread_time_ns()
        if output is not None:
            scheduler.update_from_output(done, output)
        taken.append(planned - begun + time.thread_time_ns() - resumed)
    return median_step_micros(taken)


def prefix_micros(scheduler: Scheduler) -> Figures:
    """Times hashing a prompt of PROMPT tokens, and admitting it when all of it is cached."""
    tokens = long_prompt()
    plain = make_request("plain", tokens)
    plain.block_hashes.clear()
    manager = scheduler.kv_cache_manager
    first = make_request("first", tokens)
    blocks, hit = manager.get_computed_blocks(first)[:2]
    manager.allocate_slots(first, PROMPT, hit, blocks)
    taken = []
    for number in range(REPEATS):
        request = make_request(f"hit-{number}", tokens)
        begun = time.thread_time_ns()
        blocks, hit = manager.get_computed_blocks(request)[:2]
        manager.allocate_slots(request, PROMPT - hit, hit, blocks)
        taken.append(time.thread_time_ns() - begun)
        manager.free(request)
    return prefix_figures(time_repeats(lambda: hasher(plain)), median_micros(taken))


def pool_micros(count: int) -> Figures:
    """Times allocating and freeing `count` blocks, and allocating `count` cached blocks."""
    pool = BlockPool(4096, enable_caching=True, hash_block_size=BLOCK_SIZE)
    get, free = [], []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        blocks = pool.get_new_blocks(count)
        got = time.thread_time_ns()
        pool.free_blocks(reversed(blocks))
        free.append(time.thread_time_ns() - got)
        get.append(got - begun)
    return pool_figures(count, get, free, eviction_nanos(count))


def eviction_nanos(count: int) -> list[int]:
    """The nanoseconds of each allocation of `count` cached blocks, which evicts their hashes."""
    pool = BlockPool(count + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
    taken = []
    for turn in range(REPEATS):
        request = make_request(
            f"turn-{turn}", [(turn * 7919 + index) % 30_000 for index in range(count * BLOCK_SIZE)]
        )
        begun = time.thread_time_ns()
        blocks = pool.get_new_blocks(count)
        if turn:
            taken.append(time.thread_time_ns() - begun)
        pool.cache_full_blocks(request, blocks, 0, count, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
    return taken


if __name__ == "__main__":
    main()
