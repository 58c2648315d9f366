"""Runs random steps on a worker, without scheduler and pool, and measures the steps' times."""

import time
from collections.abc import Callable

import numpy as np

from services.cli.profile.fit import Measurement
from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import Int32Array
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import StepRunner

_GREEDY = SamplingParams(temperature=0)
_LEAST_RUNS, _MOST_RUNS = 3, 31
_MORE = 2
"""Tokens of a decoding request after its context (the tokens in the KV cache): one with which the
request enters the batch, and one in the measured step.
"""


class MeasuredWorker:
    """Measures steps of random shapes. The contexts of requests are not computed: their blocks have
    arbitrary contents, which do not affect the time.
    """

    def __init__(self, runner: StepRunner, seed: int) -> None:
        self._runner = runner
        self._limits = runner.limits
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._generation = self._step = 0
        self._next_block = 0
        runner.reset()

    def measure(
        self, num_steps: int, seconds: float, progress: Callable[[int, int], None]
    ) -> list[Measurement]:
        """Measures `num_steps` steps, alternately decode steps and steps with chunks of prompts.
        All steps are run in three rounds and, until `seconds` have passed, in up to 31 rounds, so
        that a disturbance of the machine affects only one run of a step. Returns the median run of
        each step. Calls `progress` with the number of the round, and of the step in the round.
        """
        runs: list[list[Measurement]] = [[] for _ in range(num_steps)]
        began = time.perf_counter()
        for number in range(_MOST_RUNS):
            if number >= _LEAST_RUNS and time.perf_counter() - began >= seconds:
                break
            for of_step in range(num_steps):
                self._random = np.random.default_rng((self._seed, of_step))
                runs[of_step].append(self._chunks() if of_step % 2 else self._decodes())
                progress(1 + number, 1 + of_step)
        return [sorted(some, key=lambda run: run.seconds)[len(some) // 2] for some in runs]

    def _decodes(self) -> Measurement:
        contexts = self._contexts(self._between(1, self._limits.max_num_seqs), _MORE)
        self._enter(contexts)
        return self._run(np.ones_like(contexts), contexts + 1)

    def _chunks(self) -> Measurement:
        """Runs a step of requests that decode, and one or two new requests with a prompt chunk."""
        limits = self._limits
        most = limits.max_num_batched_tokens
        num_chunks = int(self._random.integers(1, 3)) if limits.max_num_seqs > 2 and most > 8 else 1
        room = min(limits.max_num_seqs - num_chunks, most - 4 * num_chunks)
        num_decodes = self._between(1, room + 1) - 1 if room > 0 else 0
        left = min((most - num_decodes) // num_chunks, limits.max_model_len - 2)
        sizes = np.array([self._between(min(2, left), left) for _ in range(num_chunks)], np.int32)
        decoding = self._contexts(num_decodes, _MORE)
        self._enter(decoding)
        before = self._contexts(num_chunks, 1 + int(sizes.max()))
        before[self._random.random(num_chunks) < 0.5] = 0
        rows = range(num_decodes, num_decodes + num_chunks)
        entering = tuple(
            self._request(row, int(computed + size), int(computed + size))
            for row, computed, size in zip(rows, before, sizes, strict=True)
        )
        counts = np.concatenate((np.ones(num_decodes, np.int32), sizes))
        computed = np.concatenate((decoding + 1, before)).astype(np.int32)
        return self._run(counts, computed, entering)

    def _between(self, least: int, most: int) -> int:
        """Draws a number from `least` to `most` whose logarithm is uniformly distributed."""
        return int(np.exp(self._random.uniform(np.log(least), np.log(most + 1))))

    def _contexts(self, count: int, num_more: int) -> Int32Array:
        """Draws the context lengths of `count` requests, so that all requests fit into the KV cache
        even with `num_more` more tokens each.
        """
        limits = self._limits
        room = limits.num_blocks * limits.block_size // (limits.num_groups * max(count, 1))
        most = max(1, min(limits.max_model_len, room) - num_more - limits.block_size)
        drawn = self._random.integers(1, self._between(1, most) + 1, count)
        return drawn.astype(np.int32)

    def _enter(self, contexts: Int32Array) -> None:
        """Begins a new batch of requests, and computes one token after each request's context."""
        self._generation += 1
        self._step = 0
        if len(contexts):
            entering = tuple(
                self._request(row, int(count) + 1, int(count) + _MORE)
                for row, count in enumerate(contexts)
            )
            # The requests need several steps if the token limit of a step is below their number.
            most = self._limits.max_num_batched_tokens
            for begin in range(0, len(contexts), most):
                some = slice(begin, begin + most)
                rows = np.arange(len(contexts), dtype=np.int32)[some]
                ones = np.ones(len(rows), np.int32)
                self._execute(rows, ones, contexts[some], entering[some])

    def _run(
        self, counts: Int32Array, computed: Int32Array, entering: tuple[NewRequest, ...] = ()
    ) -> Measurement:
        began = time.perf_counter()
        self._execute(np.arange(len(counts), dtype=np.int32), counts, computed, entering)
        return Measurement(counts, computed, time.perf_counter() - began)

    def _execute(
        self,
        rows: Int32Array,
        counts: Int32Array,
        computed: Int32Array,
        entering: tuple[NewRequest, ...],
    ) -> None:
        step = StepInput(
            self._generation, self._step, rows, counts, computed, new_requests=entering
        )
        self._runner.execute(step)
        self._step += 1

    def _request(self, row: int, num_tokens: int, room: int) -> NewRequest:
        limits = self._limits
        tables = []
        for size in limits.block_sizes:
            count = -(-min(room, limits.max_model_len) // size)
            blocks = self._next_block + np.arange(count)
            self._next_block += count
            tables.append((1 + blocks % (limits.num_blocks - 1)).astype(np.int32))
        token_ids = self._random.integers(0, limits.vocab_size, num_tokens, np.int32)
        return NewRequest(row, token_ids, num_tokens, _GREEDY, tuple(tables))
