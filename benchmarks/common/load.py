"""A load: the number and the lengths of its requests, and their measured times.

A load is a closed loop. Each of `concurrency` clients sends `requests_each` requests, one after
another. Prompts are random tokens, so that they share no prefix and nothing is found in the cache.
The output has a fixed length, because end-of-sequence tokens are ignored.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run. Equal loads have equal prompts."""

    concurrency: int
    requests_each: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    seed: str

    def prompt(self, number: int) -> list[int]:
        """The token ids of a request."""
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
        """The number of tokens that arrived."""
        return sum(count for _, count in self.arrivals)


class Client(Protocol):
    """Sends requests to the engine over one interface."""

    def generate(
        self, prompt: Sequence[int], num_tokens: int, traceparent: str = ""
    ) -> AsyncIterator[int]:
        """Sends a greedy request. Yields the number of new tokens as they arrive."""
        ...


async def run_load(
    client: Client, load: Load, traceparents: Sequence[str] = ()
) -> list[RequestTimes]:
    """Runs a load to its end. Raises AssertionError if a request has too few or too many tokens.
    `traceparents`, if given, are assigned to the requests in order; the result has the same order.
    """
    total = load.concurrency * load.requests_each
    prompts = [load.prompt(number) for number in range(total)]
    times: list[RequestTimes | None] = [None] * total

    async def one_client(first: int) -> None:
        for number in range(first, total, load.concurrency):
            traceparent = traceparents[number] if traceparents else ""
            taken = RequestTimes(time.time_ns())
            news = client.generate(prompts[number], load.output_tokens, traceparent)
            async with aclosing(news) as source:  # type: ignore[type-var]
                async for count in source:
                    taken.arrivals.append((time.time_ns(), count))
            times[number] = taken

    async with asyncio.TaskGroup() as clients:
        for first in range(load.concurrency):
            clients.create_task(one_client(first))
    done = [taken for taken in times if taken is not None]
    for taken in done:
        if taken.num_tokens != load.output_tokens:
            raise AssertionError(f"{taken.num_tokens} tokens came of {load.output_tokens}")
    return done
