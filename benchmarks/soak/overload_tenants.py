"""Overload by one of two tenants, the flooding one: the latencies of the other one, which is called
quiet, and the goodput of both.

1. Peak: a closed loop of as many requests as run at once, half of them of each tenant. It runs once
   alone, and once while the flood is sent to another server, which refuses it at almost no cost:
   services and load generators share the processors of one machine, and sending the flood takes
   part of these in any case.
2. Unloaded: the quiet tenant alone sends at a steady rate, a part of its fair share. That share is
   half of the peak beside the flood sent elsewhere, since no more can be served when it is sent
   here. This part, too, runs alone and while the flood is sent elsewhere: the difference is the
   wait for processors beside such a load generator.
3. Full: the quiet tenant goes on, and the other one has as many requests as run at once, in a
   closed loop. Nothing is refused; the quiet tenant is slower only because steps are shared.
4. Flood: the quiet tenant goes on, and the other one sends a multiple of the peak.
5. Recovery: the quiet tenant alone again, some seconds after the flood.

The peaks, Full and Recovery, whose tails are not judged, take half as long as the other parts. With
several rounds all parts are repeated, and figures are those of all rounds together, so that a
machine whose speed changes within minutes changes all parts alike. The first round sets the rates.

Of a few hundred requests the 99th percentile is one of the slowest, and differs much between runs:
beside it is the interval in which it lies in 95 % of such samples, for its quotients likewise.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.process_usage import (
    processor_seconds,
    processor_wait_seconds,
    usage_of,
)
from benchmarks.common.stack import Stack
from benchmarks.soak.attack.generators import generate, sink
from benchmarks.soak.load_generator import Sending, Sent, sum_sent
from services.cli.settings import UpSettings

FLOODS, QUIET = "sk-floods", "sk-quiet"
LEAST_QUIET_REQUESTS = 10
"""In each part, so that there is something to measure on a busy machine too."""


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """What is measured."""

    seconds: float
    factor: float
    deadline_seconds: float
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    quiet_share: float
    """What the quiet tenant asks for, of its half of the peak while the flood is sent elsewhere."""
    recovery_seconds: float
    rounds: int
    services: UpSettings
    """Of the services that are measured, but for the keys of the tenants."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of all services, before the first flood, and the most at the end of one and
    after one.
    """

    before: int
    flooded: int
    after: int


@dataclass(frozen=True, slots=True)
class Result:
    """The parts, in their order, of a round or of several."""

    peak: Sent
    peak_beside_flood: Sent
    unloaded: Sent
    unloaded_beside_flood: Sent
    full: Sent
    flood: Sent
    quiet: Sent
    recovered: Sent
    memory: Memory
    processor_seconds: dict[str, float]
    """Processor time of each service during the flood."""
    processor_wait_seconds: dict[str, float]
    """For how long the threads of each service were runnable then, and had no processor."""


class Flooding:
    """The parts of the measurement, on services that run."""

    def __init__(self, stack: Stack, options: TenantOptions) -> None:
        self._stack = stack
        self._options = options
        self._seeds = itertools.count()

    async def measure(self) -> Result:
        half = self._options.seconds / 2
        await generate(self._closed_loop(half / 2))  # the first steps of each size take longer
        peak = await self._peak()
        flood = self._sending(FLOODS, rate=self._options.factor * peak.num_done_in_time / half)
        beside = await self._peak_beside(flood)
        share = beside.num_done_in_time / half / 2
        rate = max(self._options.quiet_share * share, LEAST_QUIET_REQUESTS / half)
        rounds = [await self._round(peak, beside, flood, rate)]
        for _ in range(1, self._options.rounds):
            peak, beside = await self._peak(), await self._peak_beside(flood)
            rounds.append(await self._round(peak, beside, flood, rate))
        return sum_rounds(rounds)

    async def _round(self, peak: Sent, beside: Sent, flood: Sending, rate: float) -> Result:
        """Where the quiet tenant asks for `rate` requests a second, after the peaks."""
        seconds, half = self._options.seconds, self._options.seconds / 2
        (unloaded,) = await generate([self._sending(QUIET, rate=rate)])
        alone, _ = await self._beside_flood(flood, [self._sending(QUIET, rate=rate)], seconds)
        busy = self._sending(FLOODS, concurrency=self._options.concurrency, seconds=half)
        _, full = await generate([busy, self._sending(QUIET, rate=rate, seconds=half)])
        before = self._memory()
        used, waited = self._of_each(processor_seconds), self._of_each(processor_wait_seconds)
        flood = replace(flood, seed=next(self._seeds))
        flooded, held = await generate([flood, self._sending(QUIET, rate=rate)])
        used = _since(used, self._of_each(processor_seconds))
        waited = _since(waited, self._of_each(processor_wait_seconds))
        peak_memory = self._memory()
        await asyncio.sleep(self._options.recovery_seconds)
        memory = Memory(before, peak_memory, self._memory())
        (recovered,) = await generate([self._sending(QUIET, rate=rate, seconds=half)])
        return Result(
            peak, beside, unloaded, alone, full, flooded, held, recovered, memory, used, waited
        )

    async def _peak(self) -> Sent:
        return sum_sent(await generate(self._closed_loop(self._options.seconds / 2)))

    async def _peak_beside(self, flood: Sending) -> Sent:
        half = self._options.seconds / 2
        *loops, _ = await self._beside_flood(flood, self._closed_loop(half), half)
        return sum_sent(loops)

    async def _beside_flood(
        self, flood: Sending, sendings: Sequence[Sending], seconds: float
    ) -> list[Sent]:
        """What became of these, and of the flood, which is sent elsewhere meanwhile."""
        async with sink() as address:
            return await generate([*sendings, replace(flood, address=address, seconds=seconds)])

    def _closed_loop(self, seconds: float) -> list[Sending]:
        each = max(1, self._options.concurrency // 2)
        return [
            self._sending(key, seconds=seconds, concurrency=each, deadline_seconds=None)
            for key in (FLOODS, QUIET)
        ]

    def _sending(self, key: str, **fields: object) -> Sending:
        """Each with prompts of its own: what an earlier part asked is not found in the cache."""
        options = self._options
        defaults: dict[str, object] = {
            "address": self._stack.http,
            "key": key,
            "seconds": options.seconds,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
            "deadline_seconds": options.deadline_seconds,
            "seed": next(self._seeds),
        }
        return Sending(**(defaults | fields))  # type: ignore[arg-type]

    def _memory(self) -> int:
        return sum(usage_of(pid).rss for pid in self._stack.pids().values())

    def _of_each(self, seconds_of: Callable[[int], float]) -> dict[str, float]:
        """By service."""
        return {name: seconds_of(pid) for name, pid in self._stack.pids().items()}


async def measure(options: TenantOptions) -> Result:
    """Starts the services, and measures all parts."""
    async with Stack(replace(options.services, api_keys=(FLOODS, QUIET))) as stack:
        return await Flooding(stack, options).measure()


def sum_rounds(rounds: Sequence[Result]) -> Result:
    """The result of all rounds."""

    def sum_part(part: Callable[[Result], Sent]) -> Sent:
        return sum_sent([part(one) for one in rounds])

    def sum_seconds(seconds: Callable[[Result], dict[str, float]]) -> dict[str, float]:
        return {name: sum(seconds(one)[name] for one in rounds) for name in seconds(rounds[0])}

    return Result(
        peak=sum_part(lambda one: one.peak),
        peak_beside_flood=sum_part(lambda one: one.peak_beside_flood),
        unloaded=sum_part(lambda one: one.unloaded),
        unloaded_beside_flood=sum_part(lambda one: one.unloaded_beside_flood),
        full=sum_part(lambda one: one.full),
        flood=sum_part(lambda one: one.flood),
        quiet=sum_part(lambda one: one.quiet),
        recovered=sum_part(lambda one: one.recovered),
        memory=Memory(
            before=rounds[0].memory.before,
            flooded=max(one.memory.flooded for one in rounds),
            after=max(one.memory.after for one in rounds),
        ),
        processor_seconds=sum_seconds(lambda one: one.processor_seconds),
        processor_wait_seconds=sum_seconds(lambda one: one.processor_wait_seconds),
    )


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {name: now[name] - seconds for name, seconds in before.items()}
