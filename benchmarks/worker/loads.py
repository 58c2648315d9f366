"""The five loads of the comparison of engines, and the process that measures them.

Each engine is a process that reads names of loads from standard input and measures one load after
another. This module needs only the standard library, because other engines import it in their own
interpreters.
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
"""The number of tokens that the largest load stores in a KV cache without prefix sharing."""

PREFILL = f"prefill of {PREFILL_TOKENS} tokens, tokens/s"
PREFIX = f"{PREFIX_REQUESTS} requests that share {SHARED_TOKENS} of 416 tokens, seconds"

_LEAST_TOKEN = 300
_WARM_UP_REQUESTS, _WARM_UP_OUTPUT = 4, 4
_WARM_UP_ROUND = -1

LEAST_SECONDS = 3.0
"""Minimum time, in seconds, for which a load is repeated in each round."""

Prompts = list[list[int]]
Times = list[list[float]]
Generate = Callable[[Prompts, int], Times]
"""Generates the given number of tokens for each prompt. All prompts run at once.

Sampling is greedy, and end-of-text tokens are ignored. The result lists, for each prompt, the
`time.perf_counter` time at which each of its tokens was known.
"""


def decode_name(level: int) -> str:
    """The name of the decode load with `level` concurrent requests."""
    return f"decode, {level} at once, tokens/s"


NAMES = (PREFILL, *(decode_name(level) for level in DECODE_LEVELS), PREFIX)


class WrongTokens(Exception):
    """An engine generated more or fewer tokens than the load requires. Its time is invalid."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that start together. All prompts share their first `shared_tokens` tokens."""

    num_requests: int
    shared_tokens: int
    own_tokens: int
    num_outputs: int

    def prompts(self, vocab_size: int, seed: str) -> Prompts:
        """Random prompts. Equal seeds give equal prompts, so all engines get the same prompts."""
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
    """Measures the load `name` in round `number`, and returns its figure. Raises `WrongTokens`.

    A small model takes only milliseconds, and its time varies randomly. Therefore the load is
    repeated with other prompts until `least_seconds` have passed, and the figure is the median.
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
    """Tokens per second, counted from the time at which every prompt has its first token."""
    begun = max(each[0] for each in times)
    after = [moment for each in times for moment in each if moment > begun]
    return len(after) / (max(after) - begun)


def warm_up(generate: Generate, vocab_size: int) -> None:
    """Runs a small part of each load, so that no measured run is the first of its kind."""
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
    """Minimum time, in seconds, for which a load is repeated in each round."""
    weights: str
    """Data type of the weights. The engine must support it."""

    @property
    def vocab_size(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])


def parse_arguments(weights: Sequence[str] = ("bf16",)) -> EngineArguments:
    """Parses an engine's command line. The first of `weights`, its data types, is the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--least-seconds", type=float, default=LEAST_SECONDS)
    parser.add_argument("--weights", choices=weights, default=weights[0])
    return EngineArguments(**vars(parser.parse_args()))


def serve(generate: Generate, arguments: EngineArguments, engine: str) -> None:
    """Prints the engine's name once it is warm, then measures the loads named on standard input.

    A request is a line `[load, round]`. An answer is a line of JSON that begins with a brace. The
    engine may print lines of its log in between. Returns when standard input ends.
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
