"""Measures overload by one of two tenants. The flooding tenant sends more than can be served.

The latencies of the other, quiet tenant and the goodput of both are measured in these parts:

1. Peak: a closed loop of as many requests as can run at once. Each tenant sends half of them. This
   part runs twice: alone, and while the flood is sent to another server, which refuses it at almost
   no cost. The second run is needed because services and load generators share the processors of
   one machine, so that sending a flood always costs processor time.
2. Unloaded: only the quiet tenant sends requests, at a steady rate, which is a fraction of its fair
   share. The fair share is half of the peak that was measured while the flood was sent to another
   server, since the services cannot reach a higher peak during a flood. This part also runs alone
   and with a flood to another server. The difference between the two runs is the wait for
   processors that the load generator causes.
3. Full: the quiet tenant continues, and the flooding tenant runs a closed loop of as many requests
   as can run at once. No request is refused. The quiet tenant's requests are slower than in part 2
   only because they share steps with other requests.
4. Flood: the quiet tenant continues, and the flooding tenant sends a multiple of the peak rate.
5. Recovery: some seconds after the flood, only the quiet tenant sends requests again.

Peak, Full and Recovery take half as long as the other parts, since no goal depends on their
slowest requests. With several rounds all parts are repeated, and the figures cover all rounds
together, so that changes of the machine's speed affect all parts alike. The first round determines
the request rates of all rounds.

With a few hundred requests the 99th percentile is one of the slowest requests and varies much
between runs. Therefore the report shows 95 % confidence intervals of this percentile and of its
ratios.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.process_usage import processor_seconds, processor_wait_seconds, usage_of
from benchmarks.common.stack import Stack
from benchmarks.soak.attack.generators import Generators, sink
from benchmarks.soak.load_generator import Sending, Sent, sum_sent
from services.cli.settings import UpSettings

FLOODS, QUIET = "sk-floods", "sk-quiet"
LEAST_QUIET_REQUESTS = 10
"""Minimum number of the quiet tenant's requests in each of parts 2 to 5."""


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """The parameters of the measurement."""

    seconds: float
    factor: float
    deadline_seconds: float
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    quiet_share: float
    """The quiet tenant's rate as a fraction of its fair share, which is half of the peak that is
    measured while the flood is sent to another server.
    """
    recovery_seconds: float
    rounds: int
    services: UpSettings
    """Settings of the measured services. The tenants' API keys are added to them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of all services together.

    `before` is measured before the first flood. `flooded` is the maximum over the ends of all
    floods, and `after` is the maximum over the measurements after a flood.
    """

    before: int
    flooded: int
    after: int


@dataclass(frozen=True, slots=True)
class Result:
    """The outcomes of all parts of one round, or of several rounds together."""

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
    """Processor seconds that each service used during the flood."""
    processor_wait_seconds: dict[str, float]
    """Seconds that each service's threads waited for a processor during the flood, in total."""


class Flooding:
    """Runs the measurement's parts against running services."""

    def __init__(self, stack: Stack, generators: Generators, options: TenantOptions) -> None:
        self._stack = stack
        self._generate = generators.generate
        self._options = options
        self._seeds = itertools.count()

    async def measure(self) -> Result:
        half = self._options.seconds / 2
        await self._generate(self._closed_loop(half / 2))  # first steps of each size take longer
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
        """Runs parts 2 to 5 of a round. The quiet tenant sends `rate` requests per second."""
        seconds, half = self._options.seconds, self._options.seconds / 2
        (unloaded,) = await self._generate([self._sending(QUIET, rate=rate)])
        alone, _ = await self._beside_flood(flood, [self._sending(QUIET, rate=rate)], seconds)
        busy = self._sending(FLOODS, concurrency=self._options.concurrency, seconds=half)
        _, full = await self._generate([busy, self._sending(QUIET, rate=rate, seconds=half)])
        before = self._memory()
        used, waited = self._of_each(processor_seconds), self._of_each(processor_wait_seconds)
        flood = replace(flood, seed=next(self._seeds))
        flooded, held = await self._generate([flood, self._sending(QUIET, rate=rate)])
        used = _since(used, self._of_each(processor_seconds))
        waited = _since(waited, self._of_each(processor_wait_seconds))
        peak_memory = self._memory()
        await asyncio.sleep(self._options.recovery_seconds)
        memory = Memory(before, peak_memory, self._memory())
        (recovered,) = await self._generate([self._sending(QUIET, rate=rate, seconds=half)])
        return Result(
            peak, beside, unloaded, alone, full, flooded, held, recovered, memory, used, waited
        )

    async def _peak(self) -> Sent:
        return sum_sent(await self._generate(self._closed_loop(self._options.seconds / 2)))

    async def _peak_beside(self, flood: Sending) -> Sent:
        half = self._options.seconds / 2
        *loops, _ = await self._beside_flood(flood, self._closed_loop(half), half)
        return sum_sent(loops)

    async def _beside_flood(
        self, flood: Sending, sendings: Sequence[Sending], seconds: float
    ) -> list[Sent]:
        """Runs `sendings` for `seconds` while the flood is sent to another server.

        Returns the outcomes of `sendings`, followed by the outcome of the flood.
        """
        async with sink() as address:
            return await self._generate(
                [*sendings, replace(flood, address=address, seconds=seconds)]
            )

    def _closed_loop(self, seconds: float) -> list[Sending]:
        each = max(1, self._options.concurrency // 2)
        return [
            self._sending(key, seconds=seconds, concurrency=each, deadline_seconds=None)
            for key in (FLOODS, QUIET)
        ]

    def _sending(self, key: str, **fields: object) -> Sending:
        """The parameters of a load generator, whose prompts have no prefix in the cache."""
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
        """Maps each service's name to the result of `seconds_of` for its process id."""
        return {name: seconds_of(pid) for name, pid in self._stack.pids().items()}


async def measure(options: TenantOptions) -> Result:
    services = Stack(replace(options.services, api_keys=(FLOODS, QUIET)))
    async with services as stack, Generators() as generators:
        return await Flooding(stack, generators, options).measure()


def sum_rounds(rounds: Sequence[Result]) -> Result:
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
