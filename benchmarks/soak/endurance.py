"""Keeps the four services at full load. The test fails if anything grows, leaks or breaks.

    python -m benchmarks.soak endurance --minutes 20 [--model DIR]

Clients of every kind (benchmarks/soak/clients.py) send requests without pause. There are more
requests than can run at once, and the KV cache is too small for the running requests, so that
blocks are evicted and requests are preempted. Memory, threads and open files of each process are
sampled every few seconds. At the end every block of the KV cache must be free. The table goes to
standard output, progress to standard error. The exit status is 1 in these cases:

* The memory of a process grows by more than GROWN_BYTES after the warm-up, and the 95 % confidence
  interval of its growth rate lies above --growth-mb-per-hour.
* At the end a process has over MORE_HANDLES more threads, or open files, than after the warm-up.
* A block or a request is left, an answer is wrong, or a service ends.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.common.arguments import add_model, make_parser, positive
from benchmarks.common.console import log
from benchmarks.common.models import read_config
from benchmarks.common.process_usage import usage_of
from benchmarks.common.runs import run_program
from benchmarks.common.stack import Stack
from benchmarks.soak.attack.findings import Finding, Sample, findings, table
from benchmarks.soak.clients import KINDS, Endpoint
from benchmarks.soak.left_over import read_status, settle
from services.cli.settings import UpSettings

MAX_RUNNING = 16
NUM_CLIENTS = 24
LONGEST_TOKENS = 512
BLOCK_SIZE = 16
POOL_SEQUENCES = 3
"""The size of the KV cache, as the number of requests of maximum length that fit into it."""
WARM_UP_SHARE, WARM_UP_SECONDS = 0.25, 120.0
"""The warm-up takes the fraction WARM_UP_SHARE of the run, but at most WARM_UP_SECONDS."""
SAMPLES, SAMPLE_SECONDS = 60, 5.0
"""The minimum number of samples, and the seconds between two samples. In a run that is too short
for SAMPLES samples, the interval is shorter.
"""
ANSWER_SECONDS, SETTLE_SECONDS = 60.0, 15.0
SHOWN_ERRORS = 10


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the run, and the limit on memory growth."""

    model: Path
    minutes: float
    growth_mb_per_hour: float


class Callers:
    """Clients that send one request after another until `stopping` is set."""

    def __init__(self, world: Endpoint) -> None:
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.stopping = False
        self._world = world

    async def run(self) -> None:
        """Runs the clients. Returns when `stopping` is set and all answers have arrived."""
        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(self._client(Random(f"client/{number}")))

    async def _client(self, draw: Random) -> None:
        names = list(KINDS)
        weights = [often for often, _ in KINDS.values()]
        while not self.stopping:
            [name] = draw.choices(names, weights)
            try:
                await KINDS[name][1](self._world, draw)
            except Exception as error:
                # Every error is counted, and the client sends its next request.
                self.errors[f"{name}: {type(error).__name__}: {str(error)[:300]}"] += 1
                await asyncio.sleep(0.1)
            self.done[name] += 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run: the growth of each process, the numbers of answers and of errors, and
    what is left at the end.
    """

    findings: tuple[Finding, ...]
    done: Counter[str]
    errors: Counter[str]
    left_over: str
    stats: dict[str, Any]

    @property
    def is_good(self) -> bool:
        """Whether nothing grew, no block or request is left, and no request failed."""
        clean = not self.errors and not self.left_over
        return clean and not any(finding.complaint for finding in self.findings)


async def soak(options: Options) -> Outcome:
    """Runs the load. Raises RuntimeError when a service ends."""
    config = read_config(options.model)
    longest = min(LONGEST_TOKENS, int(config["max_position_embeddings"]))
    settings = UpSettings(
        model=options.model,
        max_num_seqs=MAX_RUNNING,
        num_blocks=POOL_SEQUENCES * -(-longest // BLOCK_SIZE) + 1,
        max_model_len=longest,
    )
    seconds = 60 * options.minutes
    async with Stack(settings) as stack, httpx.AsyncClient(trust_env=False) as http:
        log(f"serving {options.model.name} to {NUM_CLIENTS} clients for {options.minutes:g} min")
        vocab_size = int(config["vocab_size"])
        callers = Callers(Endpoint(stack.http, stack.grpc, vocab_size, longest))
        load = asyncio.create_task(callers.run())
        sampler = _Sampler(stack, http, lambda: sum(callers.done.values()))
        await sampler.run(seconds)
        callers.stopping = True
        await _ended(load)
        left_over = await sampler.settle()
        stats = (await sampler.status())["replicas"][0]["stats"]
    warm_up = min(WARM_UP_SHARE * seconds, WARM_UP_SECONDS)
    found = findings(sampler.samples, warm_up, options.growth_mb_per_hour)
    return Outcome(found, callers.done, callers.errors, left_over, stats)


async def _ended(load: "asyncio.Task[None]") -> None:
    try:
        await asyncio.wait_for(load, ANSWER_SECONDS)
    except TimeoutError as error:
        raise RuntimeError(f"requests are not answered within {ANSWER_SECONDS:g} s") from error


class _Sampler:
    """Samples the memory, threads and files of the services."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, num_done: Callable[[], int]) -> None:
        self.samples: list[Sample] = []
        self._stack = stack
        self._http = http
        self._num_done = num_done

    async def run(self, seconds: float) -> None:
        """Samples all services at regular intervals for `seconds`."""
        begun = logged = time.monotonic()
        every = min(seconds / SAMPLES, SAMPLE_SECONDS)
        while (passed := time.monotonic() - begun) < seconds:
            self.samples.append(self._sample(passed))
            if time.monotonic() - logged >= max(60.0, every):
                logged = time.monotonic()
                await self._log(passed)
            await asyncio.sleep(every)

    async def status(self) -> dict[str, Any]:
        """The gateway's status, including the status of its replica."""
        return await read_status(self._http, self._stack.http)

    async def settle(self) -> str:
        """Waits until no request runs and every block is free. If that takes too long, returns a
        description of the requests and blocks that are left. Otherwise returns an empty text.
        """
        return await settle(self._http, self._stack.http, SETTLE_SECONDS)

    def _sample(self, passed: float) -> Sample:
        try:
            usages = {name: usage_of(pid) for name, pid in self._stack.pids().items()}
        except OSError as error:
            raise RuntimeError(f"a service has ended: {error}") from error
        return Sample(passed, usages)

    async def _log(self, passed: float) -> None:
        stats = (await self.status())["replicas"][0]["stats"]
        memory = ", ".join(
            f"{name} {usage.rss / 1e6:.1f}" for name, usage in self.samples[-1].usages.items()
        )
        log(
            f"{passed / 60:5.1f} min: {self._num_done()} requests, {stats['num_running']} running, "
            f"{stats['num_waiting']} waiting, {stats['num_free_blocks']} blocks free, "
            f"{stats['num_preemptions']} preemptions; MB: {memory}"
        )


def report(outcome: Outcome) -> str:
    stats = outcome.stats
    errors = [f"{count} times {text}" for text, count in outcome.errors.most_common(SHOWN_ERRORS)]
    return "\n\n".join(
        (
            table(outcome.findings),
            "\n".join(f"{count:>8}  {name}" for name, count in outcome.done.most_common()),
            f"{outcome.done.total()} requests done, {outcome.errors.total()} went wrong; "
            f"{stats['num_steps']} steps, {stats['num_generated_tokens']} tokens generated, "
            f"{stats['num_cached_tokens']} of {stats['num_prompt_tokens']} prompt tokens found in "
            f"the cache, {stats['num_preemptions']} preemptions; "
            f"at the end {outcome.left_over or 'all blocks are free and no request is left'}",
            *errors,
            *(
                f"{finding.process} grew: {finding.complaint}"
                for finding in outcome.findings
                if finding.complaint
            ),
        )
    )


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("soak endurance", __doc__)
    parser.add_argument(
        "--minutes", type=positive, default=20.0, help="minutes of load (default: 20)"
    )
    add_model(parser)
    parser.add_argument(
        "--growth-mb-per-hour",
        type=float,
        default=24.0,
        metavar="MB",
        help="limit on the growth of a process's memory, in MB per hour (default: 24)",
    )
    parsed = parser.parse_args(argv)
    return Options(parsed.model, parsed.minutes, parsed.growth_mb_per_hour)


def main(argv: Sequence[str]) -> int:
    """Runs the test and prints the report. Returns 1 if it failed."""
    options = parse_options(argv)
    outcome = run_program(soak(options))
    print(report(outcome))
    return 0 if outcome.is_good else 1
