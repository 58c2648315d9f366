"""vLLM's scheduler and KV-cache manager under the loads of benchmarks.scheduler.

Runs in an interpreter of its own that has vLLM and nothing of ours: `benchmarks.scheduler` starts
it. Prints one line of JSON: microseconds of processor time by the name of the figure.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SIZES = (16, 64, 256, 1024)
CONTEXT = 512
BLOCK_SIZE = 16
PROMPT = 8192
STEPS = 160
REPEATS = 30

hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


def main() -> None:
    """Measures everything once."""
    init_none_hash(sha256)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for num_running in SIZES:
            for name, asynchronous in (("sync", False), ("async", True)):
                scheduler = make_scheduler(directory, num_running, asynchronous)
                figures[f"step, {num_running} running, {name}"] = step_micros(
                    scheduler, num_running, asynchronous
                )
        figures.update(prefix_micros(make_scheduler(directory, 16, False)))
    for count in (1, 64, 1024):
        figures.update(pool_micros(count))
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


def make_scheduler(directory: str, num_running: int, asynchronous: bool) -> Scheduler:
    """A scheduler over a pool that holds the load."""
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
    vllm_config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
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
    """A request that goes on for longer than the measurement."""
    sampling = SamplingParams(max_tokens=10_000, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher,
    )


def answer(scheduled: Any, requests: dict[str, Request]) -> ModelRunnerOutput:
    """One token for everybody whose prompt is computed."""
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
    """Steady decode: median of schedule() and update_from_output() together."""
    requests = {}
    for number in range(num_running):
        length = CONTEXT - 8 + number % BLOCK_SIZE
        tokens = [(number * 7919 + position) % 30_000 for position in range(length)]
        requests[str(number)] = make_request(str(number), tokens)
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
    return statistics.median(taken[STEPS // 10 :]) / 1e3


def prefix_micros(scheduler: Scheduler) -> dict[str, float]:
    """A prompt of 8192 tokens: hashed, and admitted where all of it is cached."""
    tokens = [(position * 31) % 30_000 for position in range(PROMPT)]
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
    return {
        f"hash a prompt of {PROMPT} tokens": median_micros(lambda: hasher(plain)),
        f"full hit of {PROMPT} tokens: look-up and allocation": statistics.median(taken) / 1e3,
    }


def pool_micros(count: int) -> dict[str, float]:
    """Getting and freeing so many blocks, and getting as many that are cached."""
    pool = BlockPool(4096, enable_caching=True, hash_block_size=BLOCK_SIZE)
    get, free = [], []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        blocks = pool.get_new_blocks(count)
        got = time.thread_time_ns()
        pool.free_blocks(reversed(blocks))
        free.append(time.thread_time_ns() - got)
        get.append(got - begun)
    return {
        f"get {count} blocks": statistics.median(get) / 1e3,
        f"free {count} blocks": statistics.median(free) / 1e3,
        f"get {count} cached blocks: eviction": eviction_micros(count),
    }


def eviction_micros(count: int) -> float:
    """Getting blocks of which each must forget its hash."""
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
    return statistics.median(taken) / 1e3


def median_micros(work: Callable[[], object]) -> float:
    """Median processor time of repeated work."""
    taken = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        work()
        taken.append(time.thread_time_ns() - begun)
    return statistics.median(taken) / 1e3


if __name__ == "__main__":
    main()
