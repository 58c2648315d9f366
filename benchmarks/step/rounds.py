"""Rounds of decode steps against a worker that computes nothing, and their results."""

import asyncio
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from benchmarks.common.clients import SessionClient
from benchmarks.common.process_usage import CLIENT, processor_seconds
from benchmarks.step.dummy_replica import BLOCK_SIZE, DummyReplica
from services.common.rpc.channel import open_channel

PROMPT_TOKENS = 96
WARM_UP_STEPS = 16
"""Number of steps with all requests before the measured steps."""
SPARE_STEPS = 32
"""The number of steps after the measured steps. They are needed because the prompts of many
requests take several steps, so that some requests begin and end decoding later than others.
"""
RUN_SECONDS = 120.0
_LOOK_AGAIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one run. `step_micros` are the times between steps. `processor_micros` maps a
    process's name to its processor time per step.
    """

    step_micros: Sequence[float]
    processor_micros: Mapping[str, float]
    bare_micros: float | None
    """Mean step time of the bare loop before the run. It is None if the worker's step is empty."""

    @property
    def ratio(self) -> float | None:
        """The steps per second, divided by those of the bare loop (the same steps without
        requests). None without a bare loop.
        """
        return self.bare_micros and self.bare_micros / statistics.mean(self.step_micros)


@dataclass(frozen=True, slots=True)
class StepRow:
    """Figures for one number of running requests in one scheduling mode, over all rounds."""

    running: int
    mode: str
    step_millis: float
    num_rounds: int
    median_micros: float
    """Time between steps. It is the median of the rounds' medians."""
    best_median_micros: float
    mean_micros: float
    processor_micros: dict[str, float]
    bare_micros: float | None = None
    ratio: float | None = None
    best_ratio: float | None = None


def num_tokens(num_steps: int) -> int:
    """Number of output tokens of each request if `num_steps` steps are measured."""
    return num_steps + WARM_UP_STEPS + SPARE_STEPS


def num_blocks(running: int, num_steps: int) -> int:
    """A number of KV-cache blocks that is enough for `running` requests."""
    longest = PROMPT_TOKENS + BLOCK_SIZE + num_tokens(num_steps)
    return running * (-(-longest // BLOCK_SIZE) + 1) + 64


async def run_round(
    replica: DummyReplica, running: int, num_steps: int, step_millis: float
) -> Round:
    """Runs `running` requests to their end. Raises RuntimeError if a token is missing.

    Of the steps that contain all requests, `num_steps` steps after a warm-up are measured.
    """
    bare = await replica.set_step(step_millis, num_steps if step_millis else 0)
    meter = _Meter({**replica.pids(), CLIENT: os.getpid()}, running, num_steps)
    collected: dict[int, list[int]] = defaultdict(list)
    async with asyncio.timeout(RUN_SECONDS):
        async for deltas in decode(replica, running, num_tokens(num_steps)):
            _take_in(deltas, collected)
            meter.saw(deltas)
    if {len(tokens) for tokens in collected.values()} != {num_tokens(num_steps)}:
        raise RuntimeError("not every token came")
    ended = [ended for ended, count in await replica.served() if count == running]
    ended = ended[WARM_UP_STEPS : WARM_UP_STEPS + num_steps + 1]
    return Round(
        [(after - before) / 1e3 for before, after in itertools.pairwise(ended)],
        meter.micros_per_step(),
        (bare[-1] - bare[0]) / (len(bare) - 1) / 1e3 if bare else None,
    )


async def decode(
    replica: DummyReplica, running: int, num_tokens: int
) -> AsyncIterator[scheduler_pb2.StepDeltas]:
    """Runs `running` requests, and yields the deltas of each step.

    The scheduler is paused until all requests wait, so that they start together.
    """
    client = SessionClient(replica.scheduler)
    async with open_channel(replica.scheduler) as channel:
        admin = scheduler_pb2_grpc.SchedulerAdminStub(channel)
        await admin.Pause(scheduler_pb2.PauseRequest(mode=scheduler_pb2.PAUSE_MODE_KEEP))
        resuming = asyncio.create_task(_resume_with(channel, running))
        async for deltas in client.deltas(_prompts(running), num_tokens):
            yield deltas
        await resuming
    await client.close()


def row(running: int, mode: str, step_millis: float, rounds: Sequence[Round]) -> StepRow:
    """Combines the rounds of one number of running requests and one scheduling mode."""
    medians = [statistics.median(found.step_micros) for found in rounds]
    ratios = [found.ratio for found in rounds if found.ratio is not None]
    bare = [found.bare_micros for found in rounds if found.bare_micros is not None]
    return StepRow(
        running=running,
        mode=mode,
        step_millis=step_millis,
        num_rounds=len(rounds),
        median_micros=statistics.median(medians),
        best_median_micros=min(medians),
        mean_micros=statistics.median(statistics.mean(found.step_micros) for found in rounds),
        processor_micros={
            name: statistics.median(found.processor_micros[name] for found in rounds)
            for name in rounds[0].processor_micros
        },
        bare_micros=statistics.median(bare) if bare else None,
        ratio=statistics.median(ratios) if ratios else None,
        best_ratio=max(ratios, default=None),
    )


class _Meter:
    """Measures the processor time of processes during the measured steps."""

    def __init__(self, pids: Mapping[str, int], running: int, num_steps: int) -> None:
        self._pids = pids
        self._running = running
        self._num_steps = num_steps
        self._full_since: int | None = None
        self._begun: tuple[int, dict[str, float]] | None = None
        self._ended: tuple[int, dict[str, float]] | None = None

    def saw(self, deltas: scheduler_pb2.StepDeltas) -> None:
        """Reads the processor times at the first and at the last measured step. To be called when
        the deltas of a step arrive.
        """
        if self._full_since is None:
            self._full_since = deltas.step if len(deltas.handles) == self._running else None
        elif self._begun is None:
            if deltas.step >= self._full_since + WARM_UP_STEPS:
                self._begun = deltas.step, self._read()
        elif self._ended is None and deltas.step >= self._begun[0] + self._num_steps:
            self._ended = deltas.step, self._read()

    def micros_per_step(self) -> dict[str, float]:
        """Each process's processor microseconds per step. RuntimeError if the run was too short."""
        if self._begun is None or self._ended is None:
            raise RuntimeError("the run was over before all of its steps were seen")
        (first, before), (last, after) = self._begun, self._ended
        return {name: (after[name] - before[name]) * 1e6 / (last - first) for name in self._pids}

    def _read(self) -> dict[str, float]:
        return {name: processor_seconds(pid) for name, pid in self._pids.items()}


async def _resume_with(channel: grpc.aio.Channel, running: int) -> None:
    """Resumes the scheduler once `running` requests wait."""
    scheduler, num_waiting = scheduler_pb2_grpc.SchedulerStub(channel), 0
    while num_waiting < running:
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        stats = await scheduler.GetStats(scheduler_pb2.GetStatsRequest())
        num_waiting = stats.num_waiting
    await scheduler_pb2_grpc.SchedulerAdminStub(channel).Resume(scheduler_pb2.ResumeRequest())


def _prompts(running: int) -> list[list[int]]:
    """Prompts without common prefixes, of lengths that fill blocks in different steps."""
    return [
        [
            (number * 7919 + position) % 30_000
            for position in range(PROMPT_TOKENS + number % BLOCK_SIZE)
        ]
        for number in range(running)
    ]


def _take_in(deltas: scheduler_pb2.StepDeltas, collected: dict[int, list[int]]) -> None:
    """Collects the tokens of a step as a gateway does, without detokenizing."""
    token_ids, start = list(deltas.token_ids), 0
    for handle, count in zip(deltas.handles, deltas.num_tokens, strict=True):
        collected[handle] += token_ids[start : start + count]
        start += count
