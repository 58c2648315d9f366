"""Runs the same loads on several targets in alternation, and compares the targets."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.figures import (
    Figures,
    figures_of,
    interleaved,
    median_figures,
    median_ratio,
    median_tpot_ratio,
)
from benchmarks.common.load import Load
from benchmarks.common.process_usage import processor_seconds
from benchmarks.serving.targets import Target

WARM_UP_TOKENS = 4
RUN_SECONDS = 300.0
"""Time limit of one run, in seconds."""
MIN_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """The loads of a comparison and their number of rounds.

    Each concurrency has `num_rounds` rounds. Once `level_seconds` have passed, no further round
    begins after MIN_ROUNDS rounds.
    """

    concurrencies: tuple[int, ...]
    num_rounds: int
    requests_each: int
    """The number of requests in a run, which the concurrent clients share equally."""
    prompt_tokens: int
    output_tokens: int
    level_seconds: float = 60.0

    def load(self, concurrency: int, vocab_size: int, seed: str) -> Load:
        """The load of one run at this concurrency."""
        return Load(
            concurrency=concurrency,
            requests_each=max(self.requests_each // concurrency, 1),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a target at one concurrency. `ratio` is the target's throughput divided by the
    throughput of the first target, and `tpot_ratio` the same quotient of the TPOTs.
    """

    concurrency: int
    target: str
    num_rounds: int
    figures: Figures
    ratio: float
    tpot_ratio: float
    processor_micros: dict[str, float]
    """Maps each process's name to its processor microseconds per output token."""


async def compare(
    targets: Mapping[str, Target],
    schedule: Schedule,
    vocab_size: int,
    log: Callable[[str], None],
) -> list[Row]:
    """Runs every load on all targets in alternation.

    Before each load, a short run on each target warms it up. Its results are discarded.
    """
    rows: list[Row] = []
    for concurrency in schedule.concurrencies:
        rounds: dict[str, list[Figures]] = defaultdict(list)
        spent: dict[str, dict[str, float]] = {name: defaultdict(float) for name in targets}
        for name, target in targets.items():
            await target.run(_warm_up(schedule, concurrency, vocab_size, name))
        begun = time.monotonic()
        for number, order in enumerate(interleaved(list(targets), schedule.num_rounds)):
            if number >= MIN_ROUNDS and time.monotonic() - begun > schedule.level_seconds:
                break
            for name in order:
                load = schedule.load(concurrency, vocab_size, f"{name}/{concurrency}/{number}")
                figures = await _run(targets[name], load, spent[name])
                rounds[name].append(figures)
                log(f"{concurrency:>4} at once, {name}: {figures.tokens_per_second:.0f} tokens/s")
        rows += _rows(concurrency, rounds, spent, schedule)
    return rows


async def _run(target: Target, load: Load, spent: dict[str, float]) -> Figures:
    pids = target.pids()
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    async with asyncio.timeout(RUN_SECONDS):
        figures = figures_of(await target.run(load))
    for name, pid in pids.items():
        spent[name] += processor_seconds(pid) - before[name]
    return figures


def _warm_up(schedule: Schedule, concurrency: int, vocab_size: int, name: str) -> Load:
    load = schedule.load(concurrency, vocab_size, f"{name}/{concurrency}/warm-up")
    return replace(load, requests_each=1, output_tokens=WARM_UP_TOKENS)


def _rows(
    concurrency: int,
    rounds: Mapping[str, Sequence[Figures]],
    spent: Mapping[str, Mapping[str, float]],
    schedule: Schedule,
) -> list[Row]:
    first = next(iter(spent))
    rows = []
    for target in spent:
        load = schedule.load(concurrency, 1, "")
        tokens = load.output_tokens * load.requests_each * concurrency * len(rounds[target])
        rows.append(
            Row(
                concurrency,
                target,
                len(rounds[target]),
                median_figures(rounds[target]),
                median_ratio(rounds[target], rounds[first]),
                median_tpot_ratio(rounds[target], rounds[first]),
                {name: seconds * 1e6 / tokens for name, seconds in spent[target].items()},
            )
        )
    return rows
