"""The five loads that workers are compared by, for whatever can generate.

Imports nothing of ours and nothing but the standard library: peers run it in interpreters of their
own.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

PREFILL_TOKENS = 512
DECODE_PROMPT, DECODE_OUTPUT = 128, 64
DECODE_LEVELS = (1, 8, 32)
SHARED_TOKENS, OWN_TOKENS, PREFIX_REQUESTS, PREFIX_OUTPUT = 384, 32, 32, 32

PREFILL = f"prefill of {PREFILL_TOKENS} tokens, tokens/s"
PREFIX = f"{PREFIX_REQUESTS} requests that share {SHARED_TOKENS} of 416 tokens, seconds"

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
"""Generates so many tokens of each prompt, greedily, whatever they are; returns with the last."""


def decode_name(level: int) -> str:
    """The name of the figure at a number of requests."""
    return f"decode, {level} at once, tokens/s"


NAMES = (PREFILL, *(decode_name(level) for level in DECODE_LEVELS), PREFIX)


class Loads:
    """Draws prompts that nobody has seen."""

    def __init__(self, generate: Generate, vocab_size: int, seed: int = 0) -> None:
        self._generate = generate
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def figures(self, rounds: int) -> dict[str, list[float]]:
        """Every figure, round by round, after one round for warming up."""
        found: dict[str, list[float]] = {name: [] for name in NAMES}
        for number in range(rounds + 1):
            for name in NAMES:
                value = self._measure(name)
                if number:
                    found[name].append(value)
        return found

    def prefix_seconds(self) -> float:
        """Requests that begin alike, all at once."""
        shared = self._tokens(SHARED_TOKENS)
        prompts = [shared + self._tokens(OWN_TOKENS) for _ in range(PREFIX_REQUESTS)]
        return self._seconds(prompts, PREFIX_OUTPUT)

    def _measure(self, name: str) -> float:
        if name == PREFILL:
            return PREFILL_TOKENS / self._seconds([self._tokens(PREFILL_TOKENS)], 1)
        if name == PREFIX:
            return self.prefix_seconds()
        [level] = [level for level in DECODE_LEVELS if decode_name(level) == name]
        return self._decode(level)

    def _decode(self, level: int) -> float:
        """Tokens after the first ones, by the time that they take more than the first ones."""
        first, all_ = (
            self._seconds([self._tokens(DECODE_PROMPT) for _ in range(level)], count)
            for count in (1, DECODE_OUTPUT)
        )
        return level * (DECODE_OUTPUT - 1) / (all_ - first)

    def _seconds(self, prompts: Prompts, num_tokens: int) -> float:
        begun = time.perf_counter()
        self._generate(prompts, num_tokens)
        return time.perf_counter() - begun

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(300, self._vocab_size) for _ in range(count)]


def answer(generate: Generate, vocab_size: int, rounds: int) -> None:
    """Measures, and prints the figures as a line of JSON."""
    figures = Loads(generate, vocab_size).figures(rounds)
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


def medians(figures: dict[str, list[float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.median(values) for name, values in figures.items()}
