"""Times the steps of a model runner that runs without a scheduler and a pool."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.build import build_worker
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import StepRunner, Worker
from services.worker.settings import WorkerSettings

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class StepsLoad:
    """Steps of several requests. Each request has a prefix, and computes `num_tokens` tokens."""

    name: str
    num_requests: int
    num_prefix: int
    num_tokens: int = 1

    def num_blocks(self, num_steps: int) -> int:
        """The number of blocks that one request needs for `num_steps` steps."""
        return -(-(self.num_prefix + self.num_tokens + num_steps) // BLOCK_SIZE)


def worker_for(
    model: Path, loads: Iterable[StepsLoad], num_steps: int, **settings: object
) -> Worker:
    """A worker with room for every load of `num_steps` steps."""
    most = max(load.num_requests * load.num_blocks(num_steps) for load in loads)
    values: dict[str, Any] = {
        "model": model,
        "block_size": BLOCK_SIZE,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "num_blocks": 1 + most,
        **settings,
    }
    return build_worker(WorkerSettings(**values), "benchmark", lambda: None)


class StepTimer:
    """Runs a load's steps on one runner. The keys and values of prefixes are zeros, because the
    time of attention does not depend on them.
    """

    def __init__(
        self,
        runner: StepRunner,
        num_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` returns seconds."""
        self._runner = runner
        self._num_steps = num_steps
        self._clock = clock
        self._generation = 0
        self._adapter_digests: Sequence[bytes] = (b"",)
        self._sampling: Sequence[SamplingParams] = (GREEDY,)
        self.token_ids: list[list[int]] = []
        """Sampled token ids of each step of the last turn."""

    def turn(
        self,
        load: StepsLoad,
        adapter_digests: Sequence[bytes] = (b"",),
        sampling: Sequence[SamplingParams] = (GREEDY,),
    ) -> float:
        """Runs the load's steps. Returns the median time of a step in milliseconds.

        For a prompt load, each step computes the whole prompt again. For a decode load, the decode
        steps follow one prompt step that is not timed. The requests use the given adapters and
        sampling parameters in rotation.
        """
        self._adapter_digests, self._sampling = adapter_digests, sampling
        self.token_ids.clear()
        if load.num_tokens > 1:
            return _median_millis([self._first_step(load) for _ in range(self._num_steps)])
        self._first_step(load)
        return _median_millis([self._run(load, number) for number in range(1, self._num_steps)])

    def _first_step(self, load: StepsLoad) -> float:
        self._begin(load)
        return self._run(load, 0)

    def _run(self, load: StepsLoad, number: int) -> float:
        """Runs step `number` of the load, and returns its time in seconds."""
        step = self._step(load, number)
        began = self._clock()
        output = self._runner.execute(step)
        seconds = self._clock() - began
        self.token_ids.append(output.token_ids.tolist())
        return seconds

    def _begin(self, load: StepsLoad) -> None:
        """Begins a new generation (which drops all requests), and zeroes the load's blocks."""
        self._generation += 1
        none = np.empty(0, np.int32)
        count = load.num_requests * load.num_blocks(self._num_steps)
        zeroed = np.arange(1, 1 + count, dtype=np.int32)
        self._runner.execute(
            StepInput(self._generation, 0, none, none, none, block_ids_to_zero=zeroed)
        )

    def _step(self, load: StepsLoad, number: int) -> StepInput:
        count = load.num_requests
        return StepInput(
            generation=self._generation,
            step=1 + number,
            rows=np.arange(count, dtype=np.int32),
            num_scheduled_tokens=np.full(count, load.num_tokens, np.int32),
            num_computed_tokens=np.full(count, load.num_prefix + number, np.int32),
            new_requests=() if number else self._requests(load),
        )

    def _requests(self, load: StepsLoad) -> tuple[NewRequest, ...]:
        length, width = load.num_prefix + load.num_tokens, load.num_blocks(self._num_steps)
        tables = np.arange(1, 1 + load.num_requests * width, dtype=np.int32).reshape(-1, width)
        tokens = np.random.default_rng(0).integers(3, 256, (load.num_requests, length), np.int32)
        digests, sampling = self._adapter_digests, self._sampling
        return tuple(
            NewRequest(
                row,
                tokens[row],
                length,
                sampling[row % len(sampling)],
                (tables[row],),
                adapter_digest=digests[row % len(digests)],
            )
            for row in range(load.num_requests)
        )


def turn_of_each(timers: Sequence[StepTimer], load: StepsLoad, number: int) -> tuple[float, float]:
    """Runs a turn on each of two timers, and returns their times in milliseconds.

    Every second round runs the second timer first.
    """
    if number % 2:
        second, first = timers[1].turn(load), timers[0].turn(load)
    else:
        first, second = (timer.turn(load) for timer in timers)
    return first, second


def _median_millis(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)
