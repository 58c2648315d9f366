"""Two tenants, of whom one floods: what the other one notices, and what is still done.

1. Peak: a closed loop of as many requests as run at once, half of them each tenant's. Once alone,
   and once while as many requests a second as the flood has are sent to a server that refuses them
   for next to nothing: services and load generators share one machine and its processors, and
   sending the flood costs a part of them whatever is done with it.
2. Unloaded: the quiet tenant alone asks steadily, for a part of its fair share. That is half of the
   peak while the flood is sent elsewhere: no more is there to be shared when it is sent here.
3. Full: it goes on, and the other tenant has as many requests as run at once, in a closed loop.
   Nothing is refused; what the quiet tenant notices is that steps are shared.
4. Flood: it goes on, and the other tenant asks for a multiple of the peak.
5. Recovery: the quiet tenant alone again, some seconds after the flood.

Of a few hundred requests the 99th percentile is one of the slowest, and differs much between runs:
beside it is the interval in which it lies in 95 % of such samples, for its quotient likewise.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.common.figures import percentile, percentile_interval, percentile_ratio_interval
from benchmarks.common.process_usage import processor_seconds, usage_of
from benchmarks.common.stack import Stack
from benchmarks.soak.generators import generate, sink
from benchmarks.soak.load_generator import Sending, Sent
from services.cli.settings import UpSettings
from services.worker.platforms.machine import usable_processors

FLOODS, QUIET = "sk-floods", "sk-quiet"
LEAST_GOODPUT = 0.9
MOST_TTFT, MOST_RECOVERED_TTFT = 2.0, 1.25
MOST_REFUSAL_MILLIS = 50.0
MOST_MEBIBYTES = 64.0
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
    services: UpSettings
    """Of the services that are measured, but for the keys of the tenants."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of all services."""

    before: int
    flooded: int
    after: int


@dataclass(frozen=True, slots=True)
class Result:
    """The parts, in their order."""

    peak: Sent
    peak_beside_flood: Sent
    unloaded: Sent
    full: Sent
    flood: Sent
    quiet: Sent
    recovered: Sent
    memory: Memory
    service_seconds: dict[str, float]
    """Processor time of each service during the flood."""


@dataclass(frozen=True, slots=True)
class Line:
    """A figure, and whether it is as it should be; None where nothing is asked of it."""

    name: str
    value: str
    passed: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "pass", False: "FAIL"}[self.passed]
        return f"| {self.name} | {self.value} | {verdict} |"


class Flooding:
    """The parts of the measurement, on services that run."""

    def __init__(self, stack: Stack, options: TenantOptions) -> None:
        self._stack = stack
        self._options = options
        self._seeds = itertools.count()

    async def measure(self) -> Result:
        seconds = self._options.seconds
        await generate(self._closed_loop(seconds / 4))  # the first steps of each size take longer
        peak = _sum(await generate(self._closed_loop(seconds / 2)))
        rate = peak.num_done_in_time / (seconds / 2)
        flood = self._sending(FLOODS, rate=self._options.factor * rate)
        async with sink() as address:
            aside = self._sending(FLOODS, address=address, rate=flood.rate, seconds=seconds / 2)
            *loops, _ = await generate([*self._closed_loop(seconds / 2), aside])
        beside = _sum(loops)
        share = beside.num_done_in_time / (seconds / 2) / 2
        quiet_rate = max(self._options.quiet_share * share, LEAST_QUIET_REQUESTS / seconds)
        (unloaded,) = await generate([self._sending(QUIET, rate=quiet_rate)])
        busy = self._sending(FLOODS, concurrency=self._options.concurrency)
        _, full = await generate([busy, self._sending(QUIET, rate=quiet_rate)])
        before, times = self._memory(), self._processor_seconds()
        flooded, held = await generate([flood, self._sending(QUIET, rate=quiet_rate)])
        peak_memory = self._memory()
        spent = {name: now - times[name] for name, now in self._processor_seconds().items()}
        await asyncio.sleep(self._options.recovery_seconds)
        memory = Memory(before, peak_memory, self._memory())
        (recovered,) = await generate([self._sending(QUIET, rate=quiet_rate)])
        return Result(peak, beside, unloaded, full, flooded, held, recovered, memory, spent)

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

    def _processor_seconds(self) -> dict[str, float]:
        return {name: processor_seconds(pid) for name, pid in self._stack.pids().items()}


async def measure(options: TenantOptions) -> Result:
    """Starts the services, and measures all parts."""
    async with Stack(replace(options.services, api_keys=(FLOODS, QUIET))) as stack:
        return await Flooding(stack, options).measure()


def lines_of(options: TenantOptions, result: Result) -> list[Line]:
    """The figures of a result."""
    tokens, seconds = options.output_tokens, options.seconds
    peak = result.peak.num_done_in_time * tokens / (seconds / 2)
    beside = result.peak_beside_flood.num_done_in_time * tokens / (seconds / 2)
    done = result.flood.num_done_in_time + result.quiet.num_done_in_time
    goodput = done * tokens / seconds
    unloaded, full = result.unloaded.first_token_millis, result.full.first_token_millis
    flooded, recovered = result.quiet.first_token_millis, result.recovered.first_token_millis
    if not (unloaded and full and flooded and recovered and done):
        raise RuntimeError("no request was done: the machine is too busy to measure anything")
    ttft = percentile(flooded, 99) / percentile(unloaded, 99)
    least_ttft, most_ttft = percentile_ratio_interval(flooded, unloaded, 99)
    ttft_after = statistics.median(recovered) / statistics.median(unloaded)
    refusals = result.flood.refusal_millis or [0.0]
    num_quiet_lost = result.quiet.num_sent - result.quiet.num_done
    num_lost_after = result.recovered.num_sent - result.recovered.num_done
    mebibytes = [bytes_ / 2**20 for bytes_ in _in_turn(result.memory)]
    processors = usable_processors().num_allowed * seconds
    later = f"{options.recovery_seconds:g} s later"
    return [
        Line("peak, tokens/s", f"{peak:.0f}"),
        Line("peak while the flood is sent elsewhere, tokens/s", f"{beside:.0f}"),
        Line("goodput, tokens/s", f"{goodput:.0f}"),
        Line("goodput to peak", f"{goodput / peak:.2f}"),
        Line(
            "goodput to peak while the flood is sent elsewhere",
            f"{goodput / beside:.2f}",
            goodput >= LEAST_GOODPUT * beside,
        ),
        Line("flooding tenant: requests sent / done", _counts(result.flood)),
        Line(
            "refusals, ms, median / p99",
            _pair(refusals),
            percentile(refusals, 99) <= MOST_REFUSAL_MILLIS,
        ),
        Line("flooding tenant: requests that ended otherwise", str(result.flood.other or 0)),
        Line("quiet tenant: requests sent / done", _counts(result.quiet), not num_quiet_lost),
        Line("quiet tenant, unloaded: TTFT ms, median / p99", _pair_in(unloaded)),
        Line("quiet tenant, all places taken: TTFT ms, median / p99", _pair_in(full)),
        Line("quiet tenant, during the flood: TTFT ms, median / p99", _pair_in(flooded)),
        Line(
            "its p99 to the unloaded one",
            f"{ttft:.2f} ({_interval(least_ttft, most_ttft, 2)})",
            ttft <= MOST_TTFT,
        ),
        Line(
            f"memory of the services, MiB, before / at the end / {later}",
            " / ".join(f"{one:.0f}" for one in mebibytes),
            max(mebibytes) <= mebibytes[0] + MOST_MEBIBYTES,
        ),
        Line(
            f"quiet tenant, {later}: TTFT ms, median / p99",
            _pair_in(recovered),
        ),
        Line(
            "its median to the unloaded one",
            f"{ttft_after:.2f}",
            ttft_after <= MOST_RECOVERED_TTFT and not num_lost_after,
        ),
        Line(
            "share of the processors: sending the flood",
            f"{result.flood.processor_seconds / processors:.2f}",
        ),
        *(
            Line(f"share of the processors: {name}", f"{spent / processors:.2f}")
            for name, spent in result.service_seconds.items()
        ),
    ]


def report(options: TenantOptions, lines: Sequence[Line]) -> str:
    """The figures, as a table."""
    return "\n".join(
        [
            f"| one of two tenants asks for {options.factor:g} times the peak, "
            f"{options.seconds:g} s | | |",
            "| --- | ---: | --- |",
            *map(str, lines),
        ]
    )


def _sum(parts: Sequence[Sent]) -> Sent:
    return Sent(
        num_sent=sum(part.num_sent for part in parts),
        num_done=sum(part.num_done for part in parts),
        num_done_in_time=sum(part.num_done_in_time for part in parts),
    )


def _counts(sent: Sent) -> str:
    return f"{sent.num_sent} / {sent.num_done}"


def _pair(millis: Sequence[float]) -> str:
    return f"{percentile(millis, 50):.1f} / {percentile(millis, 99):.1f}"


def _pair_in(millis: Sequence[float]) -> str:
    """The same, the interval of the p99, and how many values there are."""
    least, most = percentile_interval(millis, 99)
    return f"{_pair(millis)} ({_interval(least, most, 1)}; {len(millis)} requests)"


def _interval(least: float, most: float, digits: int) -> str:
    """Its two ends, or that too few requests leave one open."""
    if math.isinf(most):
        return "too few for an interval"
    return f"{least:.{digits}f} to {most:.{digits}f}"


def _in_turn(memory: Memory) -> tuple[int, int, int]:
    return memory.before, memory.flooded, memory.after
