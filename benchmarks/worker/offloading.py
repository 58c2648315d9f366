"""Measures the time that an offloading tier saves on hits, and the time that it costs without hits.

    python -m benchmarks.worker.offloading [--model DIR|135m] [--threads N] [--rounds N]

The tier is host memory to which KV blocks are offloaded. The gateway's core, the scheduler, the
pool and the model runner run in one process with random weights. One such composition has a tier, a
second one has none. The first table shows the time to the first token of a prompt of 1,024 tokens
that runs alone. It is measured with nothing cached, with all full blocks in the tier, and with all
full blocks in the prefix cache. The second table shows the times of loads of new prompts, which
never hit a cache. They also store blocks in the tier, and replace stored blocks once the tier is
full. Runs with and without the tier alternate. The price is the ratio of the times of the two runs,
as the median over rounds. It is shown for wall time and for processor time, since other work on the
machine disturbs processor time less.

Tables go to standard output, progress to standard error.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.common.arguments import add_sized_model, make_parser
from benchmarks.common.console import log, show
from benchmarks.common.in_process import InProcess
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from services.common.process.settings import parse_settings
from services.worker.settings import WorkerSettings

NUM_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class NewPrompts:
    """A load of new prompts, all sent at once."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int


LOADS = (
    NewPrompts("4 prompts of 512 tokens, 1 token out", 4, 512, 1),
    NewPrompts("8 prompts of 128 tokens, 64 tokens out", 8, 128, 64),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The wall time and the processor time of one run of a load, in seconds."""

    seconds: float
    processor_seconds: float


class Bench:
    """Runs prompts on a gateway's core, scheduler, pool and model runner in this process."""

    def __init__(self, composed: InProcess, seed: int) -> None:
        self._composed = composed
        self._random = random.Random(seed)

    def new_prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, 256) for _ in range(num_tokens)]

    async def first_token_seconds(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of one request that runs alone."""
        began = time.perf_counter()
        await self._finish(prompt, 1)
        return time.perf_counter() - began

    async def forget_cache(self) -> None:
        """Clears the prefix cache, but not the tier of host memory."""
        await self._composed.engine.reset_prefix_cache(preempt_running=False)

    async def turn(self, load: NewPrompts) -> Turn:
        """Runs a load of new prompts to its end, and returns its times."""
        prompts = [self.new_prompt(load.num_prompt_tokens) for _ in range(load.num_requests)]
        began, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(self._finish(prompt, load.num_output_tokens) for prompt in prompts))
        return Turn(time.perf_counter() - began, time.process_time() - used)

    async def _finish(self, prompt: Sequence[int], num_tokens: int) -> None:
        await self._composed.client.generate(prompt, num_tokens, lambda _: None)


async def first_tokens(bench: Bench, num_rounds: int) -> str:
    """Measures times to the first token, and returns the first table.

    The first round is a warm-up and is discarded.
    """
    rounds: list[tuple[float, float, float]] = []
    for _ in range(num_rounds + 1):
        prompt = bench.new_prompt(NUM_PROMPT_TOKENS)
        computed = await bench.first_token_seconds(prompt)
        await bench.forget_cache()
        loaded = await bench.first_token_seconds(prompt)
        found = await bench.first_token_seconds(prompt)
        await bench.forget_cache()
        rounds.append((computed, loaded, found))
    columns = list(zip(*rounds[1:], strict=True))
    names = ("computed", "loaded from the tier", "found in the prefix cache")
    rows = [
        f"| first token of {NUM_PROMPT_TOKENS} tokens | median, ms | least | most | to computed |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, column in zip(names, columns, strict=True):
        ratios = [one / computed for one, computed in zip(column, columns[0], strict=True)]
        figures = (statistics.median(column), min(column), max(column))
        milliseconds = " | ".join(f"{1000 * figure:.0f}" for figure in figures)
        rows.append(f"| {name} | {milliseconds} | {statistics.median(ratios):.2f} |")
    return "\n".join(rows)


async def prices(without: Bench, with_tier: Bench, num_rounds: int) -> str:
    """Measures the loads of new prompts, and returns the second table.

    The first round is a warm-up and is discarded. The order of the two compositions changes from
    round to round.
    """
    rows = [
        "| load of new prompts | without, ms | with a tier, ms | price | in processor time |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        turns: list[tuple[Turn, Turn]] = []
        for number in range(num_rounds + 1):
            if number % 2:
                second = await with_tier.turn(load)
                first = await without.turn(load)
            else:
                first = await without.turn(load)
                second = await with_tier.turn(load)
            turns.append((first, second))
        pairs = turns[1:]
        plain = statistics.median(first.seconds for first, _ in pairs)
        tiered = statistics.median(second.seconds for _, second in pairs)
        price = statistics.median(second.seconds / first.seconds for first, second in pairs)
        used = statistics.median(
            second.processor_seconds / first.processor_seconds for first, second in pairs
        )
        rows.append(
            f"| {load.name} | {1000 * plain:.0f} | {1000 * tiered:.0f} "
            f"| {price - 1:+.1%} | {used - 1:+.1%} |"
        )
    return "\n".join(rows)


async def measure(arguments: argparse.Namespace) -> None:
    flags = ["--model", str(find_model(arguments.model)), "--num-threads", str(arguments.threads)]
    flags += ["--num-blocks", str(arguments.num_blocks), "--dtype", arguments.dtype]
    tier = ["--kv-offloading-size", str(arguments.gib)]
    settings = [parse_settings(WorkerSettings, "worker", flags + more, {}) for more in ([], tier)]
    async with InProcess(settings[0]) as plain, InProcess(settings[1]) as tiered:
        without, with_tier = Bench(plain, 1), Bench(tiered, 2)
        log("time to the first token")
        show(await first_tokens(with_tier, arguments.rounds))
        log("loads that never hit")
        show(await prices(without, with_tier, arguments.rounds))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("worker.offloading", __doc__)
    add_sized_model(parser)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    parser.add_argument("--num-blocks", type=int, default=512, help="blocks of the KV cache")
    parser.add_argument("--gib", type=float, default=0.25, help="GiB of the tier")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_options(sys.argv[1:])
    show(machine_text(machine(), "python -m benchmarks.worker.offloading"))
    uvloop.run(measure(arguments))


if __name__ == "__main__":
    main()
