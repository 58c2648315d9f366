"""Measures the gain of an 8-bit KV cache, in alternating steps with and without such a cache.

    python -m benchmarks.worker.kv_cache --model 135m --threads 2 --rounds 7

Two workers of the same model, with --kv-cache-dtype auto and int8_per_token_head, alternate on the
same steps: decodes of one and of many requests after short and long contexts, and a prompt chunk.
In each round each worker computes a few steps, and the result is their median time. The last
columns are the ratio of the two workers' tokens per second, as the median over rounds. The bytes
per token include all layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.arguments import add_sized_model, make_parser
from benchmarks.common.console import show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.worker.step_timer import BLOCK_SIZE, StepsLoad, StepTimer, turn_of_each, worker_for
from services.worker.backends.choices import KVCacheDtype
from services.worker.core.worker import Worker
from services.worker.models.config import DtypeSetting

LOADS = (
    StepsLoad("decode, 1 behind 2,000 tokens", 1, 2000),
    StepsLoad("decode, 8 behind 2,000 tokens", 8, 2000),
    StepsLoad("decode, 32 behind 2,000 tokens", 32, 2000),
    StepsLoad("decode, 1 behind 128 tokens", 1, 128),
    StepsLoad("decode, 32 behind 128 tokens", 32, 128),
    StepsLoad("512 tokens of a prompt behind 1,024", 1, 1024, 512),
)


def main() -> None:
    parser = make_parser("worker.kv_cache", __doc__)
    add_sized_model(parser)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each worker")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    arguments = parser.parse_args()
    show(machine_text(machine(), "python -m benchmarks.worker.kv_cache"))
    torch.set_num_threads(arguments.threads)
    model, dtype = find_model(arguments.model), DtypeSetting(arguments.dtype)
    workers = [build(model, dtype, kept, arguments.steps) for kept in KVCacheDtype]
    show(sizes(workers))
    show(table(workers, LOADS, arguments.rounds, arguments.steps))


def build(model: Path, dtype: DtypeSetting, kept: KVCacheDtype, num_steps: int) -> Worker:
    """A worker whose KV cache is large enough for every load."""
    settings = {"dtype": dtype, "kv_cache_dtype": kept, "max_model_len": 2048}
    return worker_for(model, LOADS, num_steps, **settings)


def sizes(workers: Sequence[Worker]) -> str:
    """A sentence with each worker's KV-cache bytes per token, and their ratio."""
    plain, coded = (worker.description.bytes_per_block / BLOCK_SIZE for worker in workers)
    names = [worker.description.kv_cache_dtype for worker in workers]
    return (
        f"{plain:,.0f} bytes a token in {names[0]}, {coded:,.0f} in {names[1]}: "
        f"{coded / plain:.3f} of them"
    )


def table(
    workers: Sequence[Worker], loads: Sequence[StepsLoad], num_rounds: int, num_steps: int
) -> str:
    """Measures every load. The first round is a warm-up and is discarded."""
    timers = [StepTimer(worker.runner, num_steps) for worker in workers]
    names = [worker.description.kv_cache_dtype for worker in workers]
    rows = [
        f"| load | {names[0]}, ms | {names[1]}, ms | tokens/s, ratio | least, most |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for load in loads:
        turns = [turn_of_each(timers, load, number) for number in range(num_rounds + 1)][1:]
        plain, coded = (statistics.median(times) for times in zip(*turns, strict=True))
        ratios = [first / second for first, second in turns]
        rows.append(
            f"| {load.name} | {plain:.1f} | {coded:.1f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f}, {max(ratios):.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
