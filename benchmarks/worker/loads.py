"""The five loads that engines are compared by, and the process that measures them.

Imports the standard library alone: other engines run it in interpreters of their own. An engine of
the comparison is a process that measures loads one after the other, as they are named on its
standard input.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFILL_TOKENS = 512
DECODE_PROMPT, DECODE_OUTPUT = 128, 64
DECODE_LEVELS = (1, 8, 32)
SHARED_TOKENS, OWN_TOKENS, PREFIX_REQUESTS, PREFIX_OUTPUT = 384, 32, 32, 32
MAX_REQUESTS = 32
MAX_TOKENS = MAX_REQUESTS * (SHARED_TOKENS + OWN_TOKENS + PREFIX_OUTPUT)
"""What the largest load keeps in a cache that shares nothing."""

PREFILL = f"prefill of {PREFILL_TOKENS} tokens, tokens/s"
PREFIX = f"{PREFIX_REQUESTS} requests that share {SHARED_TOKENS} of 416 tokens, seconds"

_LEAST_TOKEN = 300
_WARM_UP_REQUESTS, _WARM_UP_OUTPUT = 4, 4
_WARM_UP_ROUND = -1

LEAST_SECONDS = 3.0
"""A load that takes less is repeated for as long in each round."""

Prompts = list[list[int]]
Times = list[list[float]]
Generate = Callable[[Prompts, int], Times]
"""Generates a number of tokens of each prompt, greedily, ends of text ignored; begins all at once.

Returns for each prompt when each of its tokens was known, by `time.perf_counter`.
"""


def decode_name(level: int) -> str:
    """The name of the figure at a number of requests."""
    return f"decode, {level} at once, tokens/s"


NAMES = (PREFILL, *(decode_name(level) for level in DECODE_LEVELS), PREFIX)


class WrongTokens(Exception):
    """An engine generated more or fewer tokens than the load has: its time means nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that begin together. `shared_tokens` of each prompt are the same in all."""

    num_requests: int
    shared_tokens: int
    own_tokens: int
    num_outputs: int

    def prompts(self, vocab_size: int, seed: str) -> Prompts:
        """Random prompts: the same for every engine with one seed, others with another."""
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [
                draw.randrange(min(_LEAST_TOKEN, vocab_size // 2), vocab_size) for _ in range(count)
            ]

        shared = tokens(self.shared_tokens)
        return [shared + tokens(self.own_tokens) for _ in range(self.num_requests)]


LOADS = {
    PREFILL: Load(1, 0, PREFILL_TOKENS, 1),
    **{decode_name(level): Load(level, 0, DECODE_PROMPT, DECODE_OUTPUT) for level in DECODE_LEVELS},
    PREFIX: Load(PREFIX_REQUESTS, SHARED_TOKENS, OWN_TOKENS, PREFIX_OUTPUT),
}


def measure(
    generate: Generate,
    vocab_size: int,
    name: str,
    number: int,
    least_seconds: float = LEAST_SECONDS,
) -> float:
    """The figure of a load in the round of this number; raises `WrongTokens`.

    A small model takes milliseconds, which vary by chance: the load is repeated with other prompts
    until `least_seconds` are over, and the median counts.
    """
    figures: list[float] = []
    until = time.perf_counter() + least_seconds
    while not figures or time.perf_counter() < until:
        seed = f"{name}, round {number}, run {len(figures)}"
        begun, times = _run(generate, LOADS[name], vocab_size, seed)
        figures.append(_figure(name, begun, times))
    return statistics.median(figures)


def _figure(name: str, begun: float, times: Times) -> float:
    if name == PREFILL:
        return PREFILL_TOKENS / (times[0][0] - begun)
    if name == PREFIX:
        return max(map(max, times)) - begun
    return decode_rate(times)


def decode_rate(times: Times) -> float:
    """Tokens a second after all prompts have their first token; earlier ones do not count."""
    begun = max(each[0] for each in times)
    after = [moment for each in times for moment in each if moment > begun]
    return len(after) / (max(after) - begun)


def warm_up(generate: Generate, vocab_size: int) -> None:
    """Runs a little of each load, so that no measured run is the first of its kind."""
    for name, load in LOADS.items():
        requests = min(load.num_requests, _WARM_UP_REQUESTS)
        outputs = min(load.num_outputs, _WARM_UP_OUTPUT)
        little = Load(requests, load.shared_tokens, load.own_tokens, outputs)
        _run(generate, little, vocab_size, f"{name}, round {_WARM_UP_ROUND}")


def _run(generate: Generate, load: Load, vocab_size: int, seed: str) -> tuple[float, Times]:
    prompts = load.prompts(vocab_size, seed)
    begun = time.perf_counter()
    times = generate(prompts, load.num_outputs)
    if [len(each) for each in times] != [load.num_outputs] * load.num_requests:
        raise WrongTokens(f"{load}: {[len(each) for each in times]} tokens")
    return begun, times


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The command line of an engine."""

    model: Path
    threads: int
    least_seconds: float
    """Of one load in one round."""
    weights: str
    """Their data type, of those that the engine offers."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary."""
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])


def parse_arguments(weights: Sequence[str] = ("bf16",)) -> EngineArguments:
    """Parses the command line of an engine that offers these data types of weights; the first is
    the default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--least-seconds", type=float, default=LEAST_SECONDS)
    parser.add_argument("--weights", choices=weights, default=weights[0])
    return EngineArguments(**vars(parser.parse_args()))


def serve(generate: Generate, arguments: EngineArguments, engine: str) -> None:
    """Prints the engine's name once it is warm, then measures the loads named on standard input.

    A request is a line `[load, round]`, an answer a line of JSON that begins with a brace; lines of
    the engine's log may come between them. Returns when standard input ends.
    """
    warm_up(generate, arguments.vocab_size)
    _print({"engine": engine})
    for line in sys.stdin:
        name, number = json.loads(line)
        value = measure(generate, arguments.vocab_size, name, number, arguments.least_seconds)
        _print({"value": value})


def _print(content: dict[str, object]) -> None:
    sys.stdout.write("\n" + json.dumps(content) + "\n")
    sys.stdout.flush()
