"""A load: the number and the lengths of its requests, and their measured times.

A load is a closed loop. `concurrency` clients send `requests_each` requests each, on average, one
after another. Prompts are random tokens, so that they share no prefix and nothing is found in the
cache. The output has a fixed length, because end-of-sequence tokens are ignored.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

from services.cli.bench.core.load_run import LoadRun
from services.cli.bench.core.session_run import Budget
from services.cli.bench.run import RunClock

Arrived = Callable[[int], None]
"""Called with the number of new tokens of a request when they arrive."""


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters of one run's requests. Equal loads have equal prompts."""

    concurrency: int
    requests_each: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    seed: str

    def prompt(self, number: int) -> list[int]:
        """Random token ids of the prompt of request `number`."""
        draw = random.Random(f"{self.seed}/{number}")
        return [draw.randrange(self.vocab_size) for _ in range(self.prompt_tokens)]


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in nanoseconds since the epoch. `arrivals` are pairs of the time at
    which tokens arrived and their number.
    """

    sent: int
    arrivals: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


class Client(Protocol):
    async def generate(
        self, prompt: Sequence[int], num_tokens: int, arrived: Arrived, traceparent: str = ""
    ) -> None: ...


async def run_load(
    client: Client, load: Load, traceparents: Sequence[str] = ()
) -> list[RequestTimes]:
    """Runs a load to its end. `traceparents`, if given, are assigned to the requests in order.
    Returns the requests' times in this order. Raises AssertionError if a request has too few or too
    many tokens.
    """
    total = load.concurrency * load.requests_each
    prompts = [load.prompt(number) for number in range(total)]
    times = [RequestTimes(0) for _ in range(total)]

    async def send(number: int, _: float) -> bool:
        taken, traceparent = times[number], traceparents[number] if traceparents else ""

        def arrived(count: int) -> None:
            taken.arrivals.append((time.time_ns(), count))

        taken.sent = time.time_ns()
        await client.generate(prompts[number], load.output_tokens, arrived, traceparent)
        if taken.num_tokens != load.output_tokens:
            raise AssertionError(f"{taken.num_tokens} tokens came of {load.output_tokens}")
        return True

    loop = LoadRun(RunClock(), Budget(total, None, 0))
    await loop.closed_loop(repeat(send), load.concurrency)
    return times
