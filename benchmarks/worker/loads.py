"""The five loads that workers are compared by, for whatever can generate.

Imports nothing of ours and nothing but the standard library: peers run it in interpreters of their
own. A side of the comparison is a process that answers, one after the other, the loads that it is
asked for.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
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
"""Of one load in one round."""

Prompts = list[list[int]]
Times = list[list[float]]
Generate = Callable[[Prompts, int], Times]
"""Generates so many tokens of each prompt, greedily, whatever they are; begins all at once.

Tells for each prompt when each of its tokens was known, by `time.perf_counter`.
"""


def decode_name(level: int) -> str:
    """The name of the figure at a number of requests."""
    return f"decode, {level} at once, tokens/s"


NAMES = (PREFILL, *(decode_name(level) for level in DECODE_LEVELS), PREFIX)


class WrongTokens(Exception):
    """A side generated more or less than it was asked for: what it took says nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that begin together. `shared_tokens` of each prompt are the same in all."""

    num_requests: int
    shared_tokens: int
    own_tokens: int
    num_outputs: int

    def prompts(self, vocab_size: int, seed: str) -> Prompts:
        """Prompts that nobody has seen with another seed, and everybody sees with this one."""
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

    A small model is done in milliseconds, which chance decides: the load is repeated with other
    prompts until `least_seconds` are over, and the median counts.
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
    """Tokens a second from where all have their first token; what came before counts nowhere."""
    begun = max(each[0] for each in times)
    after = [moment for each in times for moment in each if moment > begun]
    return len(after) / (max(after) - begun)


def warm_up(generate: Generate, vocab_size: int) -> None:
    """A little of each load, so that nothing is done for the first time when it counts."""
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
class SideArguments:
    """What every side is told when it starts."""

    model: Path
    threads: int

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary."""
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])


def parse_side() -> SideArguments:
    """The command line of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parsed = parser.parse_args()
    return SideArguments(parsed.model, parsed.threads)


def answer(generate: Generate, vocab_size: int, engine: str) -> None:
    """Says what it is once it is warm, then answers the loads of standard input until its end.

    A question is a line `[name, round]`, an answer a line of JSON that begins with a brace; an
    engine's log may stand between them. Between questions it waits without computing.
    """
    warm_up(generate, vocab_size)
    _say({"engine": engine})
    for name, number in _questions():
        _say({"value": measure(generate, vocab_size, name, number)})


def _questions() -> Iterable[tuple[str, int]]:
    for line in sys.stdin:
        name, number = json.loads(line)
        yield name, number


def _say(content: dict[str, object]) -> None:
    sys.stdout.write("\n" + json.dumps(content) + "\n")
    sys.stdout.flush()
