"""Generates the workloads of `agents.py`, and agents with four kinds of pauses between requests.

The quantiles are from 692 sessions of a coding agent (kv-cache-tester, 2026). Values are drawn from
quantiles, because the tails of these sessions are not lognormal.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from services.simulation.laboratory.agents import LOADS
from services.simulation.laboratory.programs import Program, Turn

Quantiles = Sequence[tuple[float, float]]
"""Pairs of a fraction and the value that this fraction of all values does not exceed."""

TURNS: Quantiles = ((0, 1), (0.1, 7), (0.5, 44), (0.9, 149), (0.99, 342), (1, 400))
GROWTH: Quantiles = ((0, 40), (0.1, 184), (0.5, 655), (0.9, 3_636), (0.99, 16_600), (1, 24_000))
OUTPUT: Quantiles = ((0, 30), (0.1, 104), (0.5, 217), (0.9, 894), (0.99, 3_680), (1, 6_000))
PAUSES: Quantiles = ((0, 1), (0.1, 4), (0.5, 9.8), (0.9, 120), (0.99, 1_901), (1, 3_600))
FIRST_OWN: Quantiles = ((0, 1_000), (0.5, 9_200), (0.9, 245_000), (1, 330_000))
"""Tokens of the first prompt after the 14,800 shared ones. The whole first prompt has a median of
24,000 tokens and a 90th percentile of 260,000 tokens.
"""
SHARED_TOKENS = 14_800
COMPACTION, KEPT = 0.004, 0.3
SUBAGENTS, SUBAGENT_TURNS = 0.04, 11
NUM_APPLICATIONS, PARETO = 6, 1.1
CODING_SCALE = 0.25


def draw(rng: random.Random, quantiles: Quantiles) -> float:
    """Draws a value by inverse CDF, log-linear between the quantiles."""
    share = rng.random()
    for (low, first), (high, second) in pairwise(quantiles):
        if share <= high:
            part = (share - low) / (high - low)
            return math.exp(math.log(first) * (1 - part) + math.log(second) * part)
    raise AssertionError("the last quantile is 1")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The size of a generated workload. The seed determines all programs (clients' requests)."""

    num_programs: int
    programs_per_second: float
    seed: int
    scale: float = 1.0
    """Factor for all numbers of tokens."""
    max_tokens: int = 1 << 20
    """Limit on a program's tokens. A program ends before the first turn that would exceed it."""


def automated_pause(rng: random.Random) -> float:
    """The time of a tool that a program runs: mostly below a second, sometimes 20 s."""
    return 20.0 if rng.random() < 0.03 else rng.lognormvariate(math.log(0.5), 1.2)


def interactive_pause(rng: random.Random) -> float:
    return draw(rng, PAUSES)


def alternating_pause(rng: random.Random) -> float:
    return automated_pause(rng) if rng.random() < 0.5 else interactive_pause(rng)


PAUSES_OF: dict[str, Callable[[random.Random], float]] = {
    "automated": automated_pause,
    "interactive": interactive_pause,
    "alternating": alternating_pause,
    "coding": interactive_pause,
}
NAMES = (*PAUSES_OF, *LOADS)


def generate(name: str, traffic: Traffic) -> Iterator[Program]:
    """Yields the programs of a workload in order of arrival. Arrivals are a Poisson process."""
    rng = random.Random(f"{name} {traffic.seed}")
    numbers = iter(range(1, 1 << 27))
    if name == "coding":
        traffic = replace(traffic, scale=CODING_SCALE * traffic.scale)
    now = 0.0
    for _ in range(traffic.num_programs):
        now += rng.expovariate(traffic.programs_per_second)
        application = min(NUM_APPLICATIONS, int(rng.paretovariate(PARETO))) - 1
        if name in LOADS:
            turns, shared = LOADS[name](rng, traffic.scale)
            turns = _that_fit(turns, shared, traffic.max_tokens)
        else:
            has_subagents = name != "coding" and rng.random() < 0.25
            turns, shared = _agent(
                rng, PAUSES_OF[name], traffic, application, numbers, has_subagents=has_subagents
            )
        yield Program(
            next(numbers), now, turns, application, shared, tenant=f"application-{application}"
        )


def _that_fit(turns: Sequence[Turn], context: int, max_tokens: int) -> tuple[Turn, ...]:
    """Returns the turns before the first one with which the program's tokens would exceed
    `max_tokens`. The first turn is always returned, shortened if needed. `context` is the number of
    shared tokens.
    """
    fitting: list[Turn] = []
    for turn in turns:
        new, output = turn.num_new_tokens, turn.num_output_tokens
        if not fitting:
            new, output = max(1, min(new, max_tokens // 2 - context)), min(output, max_tokens // 4)
        context += new + output
        if fitting and context > max_tokens:
            break
        fitting.append(replace(turn, num_new_tokens=new, num_output_tokens=output))
    return tuple(fitting)


def _agent(
    rng: random.Random,
    pause: Callable[[random.Random], float],
    traffic: Traffic,
    application: int,
    numbers: Iterator[int],
    *,
    has_subagents: bool,
) -> tuple[tuple[Turn, ...], int]:
    scale = traffic.scale
    shared = round(SHARED_TOKENS * scale)
    num_turns = max(1, round(draw(rng, TURNS)))
    turns = _turns(rng, pause, traffic, num_turns, shared, draw(rng, FIRST_OWN))
    if has_subagents:
        for index, turn in enumerate(turns[:-1]):
            if rng.random() < SUBAGENTS:
                children = tuple(
                    Program(
                        next(numbers),
                        0.0,
                        tuple(_turns(rng, automated_pause, traffic, SUBAGENT_TURNS, shared, 1_000)),
                        application,
                        shared,
                        f"application-{application}",
                    )
                    for _ in range(rng.randint(1, 4))
                )
                turns[index] = replace(turn, subagents=children)
    return tuple(turns), shared


def _turns(
    rng: random.Random,
    pause: Callable[[random.Random], float],
    traffic: Traffic,
    num_turns: int,
    shared: int,
    first_own: float,
) -> list[Turn]:
    turns: list[Turn] = []
    context = shared
    for number in range(num_turns):
        growth = draw(rng, GROWTH) if number else first_own
        output = _tokens(traffic.scale * draw(rng, OUTPUT))
        new, kept, seconds = _tokens(traffic.scale * growth), None, pause(rng)
        if number and rng.random() < COMPACTION:
            kept = max(shared, round(KEPT * context))
            context = kept
        if context + new + output > traffic.max_tokens:
            if number:
                break
            new = max(1, min(new, traffic.max_tokens // 2 - context))
            output = min(output, traffic.max_tokens // 4)
        turns.append(Turn(new, output, seconds, kept))
        context += new + output
    return turns


def _tokens(number: float) -> int:
    return max(1, round(number))
