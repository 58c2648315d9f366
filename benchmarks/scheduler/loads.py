"""The loads and the timing of the comparison of schedulers.

This module needs only the standard library, because it is also imported in vLLM's interpreter.
"""

import statistics
import time
from collections.abc import Callable

SIZES = (16, 64, 256, 1024)
"""Numbers of running requests."""
CONTEXT = 512
"""Approximate number of tokens of each running request."""
BLOCK_SIZE = 16
PROMPT = 8192
"""Length, in tokens, of the prompt that is hashed and found in the cache."""
STEPS = 160
REPEATS = 30
BLOCK_COUNTS = (1, 64, 1024)
"""Numbers of blocks that are allocated and freed at once."""

Figures = dict[str, float]
"""Maps names of figures to processor microseconds."""


def step_name(num_running: int, *, async_scheduling: bool) -> str:
    return f"step, {num_running} running, {'async' if async_scheduling else 'sync'}"


def context_tokens(number: int) -> list[int]:
    """The prompt of request `number`. The lengths of 16 consecutive requests all differ, so that in
    each step one request in 16 fills a block.
    """
    length = CONTEXT - 8 + number % BLOCK_SIZE
    return [(number * 7919 + position) % 30_000 for position in range(length)]


def long_prompt() -> list[int]:
    return [(position * 31) % 30_000 for position in range(PROMPT)]


def median_step_micros(nanos: list[int]) -> float:
    """The median step time in microseconds. The first tenth of the steps is ignored."""
    return statistics.median(nanos[STEPS // 10 :]) / 1e3


def median_micros(nanos: list[int]) -> float:
    return statistics.median(nanos) / 1e3


def time_repeats(work: Callable[[], object]) -> float:
    """Runs `work` repeatedly. Returns its median processor time in microseconds."""
    nanos: list[int] = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        work()
        nanos.append(time.thread_time_ns() - begun)
    return median_micros(nanos)


def prefix_figures(hashing: float, full_hit: float) -> Figures:
    """The figures of hashing a prompt of PROMPT tokens, and of admitting the cached prompt."""
    return {
        f"hash a prompt of {PROMPT} tokens": hashing,
        f"full hit of {PROMPT} tokens: look-up and allocation": full_hit,
    }


def pool_figures(count: int, get: list[int], free: list[int], evict: list[int]) -> Figures:
    """The figures of allocating, freeing and evicting `count` blocks."""
    return {
        f"get {count} blocks": median_micros(get),
        f"free {count} blocks": median_micros(free),
        f"get {count} cached blocks: eviction": median_micros(evict),
    }
