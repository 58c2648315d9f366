"""Serves requests under random schedules, in which rare events are more frequent than with a
scheduler.

A step computes a random number of tokens of some running requests, with drafts after their last
token. Requests are preempted, in groups or alone, and resume in another row of the persistent
batch. When a new generation begins, the worker drops all requests and cached blocks. The pool finds
every filled block until the block is allocated again, so that requests share the computed blocks
that each KV-cache group's window needs. Blocks are allocated in random order, with their old
contents or zeroed. If the runner proposes drafts itself, steps contain placeholders for drafts, and
count the drafts of the previous step as accepted.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import StepInput, StepOutput
from tests.tiny_models import VOCAB_SIZE
from tests.worker.runner_driver import Request, appended, ints

Key = tuple[object, ...]


class RandomPool:
    """The blocks of all KV-cache groups. A full block is found by all tokens up to its end."""

    def __init__(self, num_blocks: int, random: np.random.Generator) -> None:
        self._random = random
        self._ref_cnt: Counter[int] = Counter()
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._num_blocks = num_blocks

    def find(self, key: Key) -> int | None:
        """A block that has the keys and values of these tokens."""
        return self._block_of.get(key)

    def remember(self, key: Key, block: int) -> None:
        """Records that a block is full. Its key finds it, unless the key finds another block."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def take(self) -> int:
        while self._ref_cnt[block := int(self._random.integers(1, self._num_blocks))]:
            pass
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
        self._ref_cnt[block] += 1
        return block

    def touch(self, blocks: list[int]) -> None:
        self._ref_cnt.update(block for block in blocks if block)

    def free(self, blocks: list[int]) -> None:
        self._ref_cnt.subtract(block for block in blocks if block)

    def forget(self) -> None:
        self._block_of.clear()
        self._key_of.clear()


@dataclass
class Happened:
    """Counts of events. None of these events may change a request's tokens."""

    preempted: int = 0
    hit_tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    generations: int = 1


class RandomServing:
    """Serves requests with a model runner. Equal seeds and equal answers yield equal schedules."""

    def __init__(self, runner: ModelRunner, *, max_chunk: int, seed: int) -> None:
        self._runner = runner
        self._random = np.random.default_rng(seed)
        self._max_chunk = max_chunk
        self._loss_rate = min(1.0, max_chunk / 7)
        """A factor on the probabilities of preemptions and new generations. It is below 1 for
        chunks of less than 7 tokens, because recomputing lost tokens then takes more steps.
        """
        self._pool = RandomPool(runner.limits.num_blocks, self._random)
        self._rows = list(range(runner.limits.max_num_seqs))
        self._removed: list[int] = []
        self._rejected: dict[int, int] = {}
        """For each row, how many drafts of its last step were rejected."""
        self._step = 0
        self.happened = Happened()

    def run(self, requests: list[Request], drafts: dict[tuple[int, ...], list[int]]) -> None:
        """Serves requests to their ends. `drafts`: for each prompt, the output used for drafts."""
        while waiting := [request for request in requests if not request.finished]:
            self._preempt([request for request in waiting if request.row is not None])
            chosen = [request for request in waiting if self._random.random() < 0.7]
            self._compute(chosen or waiting[:1], drafts)
            for request in requests:
                if request.finished and request.row is not None:
                    self._remove(request)

    def _preempt(self, running: list[Request]) -> None:
        if self._random.random() < 0.03 * self._loss_rate:
            self.happened.generations += 1
            for request in running:
                self._remove(request)
            self._removed.clear()
            self._pool.forget()
            return
        for request in running:
            if self._random.random() < 0.05 * self._loss_rate:
                self.happened.preempted += 1
                self._remove(request)

    def _remove(self, request: Request) -> None:
        assert request.row is not None
        self._removed.append(request.row)
        self._rows.append(request.row)
        for table in request.tables:
            self._pool.free(table)
        self._rejected.pop(request.row, None)
        request.row, request.tables, request.num_computed = None, [], 0

    def _compute(self, chosen: list[Request], drafts: dict[tuple[int, ...], list[int]]) -> None:
        random, entering, drafted = self._random, [], []
        grown: list[list[tuple[int, list[int]]]] = [[] for _ in self._runner.limits.windows]
        counts, cleared = [], []
        for request in chosen:
            is_new = request.row is None
            if is_new:
                self._enter(request)
            left = len(request.tokens) - request.num_computed
            count = int(random.integers(1, min(left, self._max_chunk) + 1))
            own = self._draft(request, drafts) if count == left else []
            added = self._extend(request, self._num_computed(request) + count + len(own))
            if random.random() < 0.3:
                cleared += [block for blocks in added for block in blocks]
            if is_new:
                entering.append(request.as_new())
            elif any(added):
                for group, blocks in enumerate(added):
                    grown[group].append((request.row, blocks))
            counts.append(count)
            drafted.append(own)
        output = self._runner.execute(
            StepInput(
                generation=self.happened.generations,
                step=self._step,
                rows=ints(*(request.row for request in chosen)),
                num_scheduled_tokens=ints(
                    *(count + len(own) for count, own in zip(counts, drafted, strict=True))
                ),
                num_computed_tokens=ints(*map(self._num_computed, chosen)),
                removed_rows=ints(*self._removed),
                new_requests=tuple(entering),
                appended_blocks=tuple(appended(*of_group) for of_group in grown)
                if any(grown)
                else (),
                num_draft_tokens=ints(*map(len, drafted)) if any(drafted) else ints(),
                draft_token_ids=ints(*(token for own in drafted for token in own)),
                block_ids_to_zero=ints(*cleared),
            )
        )
        self._step += 1
        self._removed.clear()
        self._take(chosen, counts, drafted, output)

    def _num_computed(self, request: Request) -> int:
        """The number of computed tokens that a scheduler which plans ahead would count."""
        assert request.row is not None
        return request.num_computed + self._rejected.get(request.row, 0)

    def _enter(self, request: Request) -> None:
        """Assigns a row to a request, with all or a part of its prefix hit."""
        request.row = self._rows.pop(int(self._random.integers(len(self._rows))))
        request.prompt_rows.clear()
        unit = math.lcm(*self._runner.limits.block_sizes)
        hit = 0
        if request.sampling.prompt_logprobs is None and self._random.random() < 0.9:
            hit = (len(request.tokens) - 1) // unit * unit
        while hit and any(None in table for table in self._tables(request, hit)):
            hit -= unit
        request.tables = [[b or 0 for b in table] for table in self._tables(request, hit)]
        request.num_computed = hit
        self.happened.hit_tokens += request.num_computed
        for table in request.tables:
            self._pool.touch(table)

    def _tables(self, request: Request, num_tokens: int) -> list[list[int | None]]:
        """For each KV-cache group, the cached blocks of the request's prefix: 0 for a block outside
        the group's window, None for a block that is not cached.
        """
        sizes = self._runner.limits.block_sizes
        return [
            [
                0 if block < begin else self._pool.find(self._key(request, group, block))
                for block in range(num_tokens // sizes[group])
            ]
            for group, begin in enumerate(self._first_seen(num_tokens))
        ]

    def _key(self, request: Request, group: int, block: int) -> Key:
        end = (block + 1) * self._runner.limits.block_sizes[group]
        return (group, request.embeds, *request.tokens[:end])

    def _first_seen(self, num_computed: int) -> list[int]:
        """For each KV-cache group, the first block that the next token attends to."""
        limits = self._runner.limits
        return [
            0 if window is None else max(0, num_computed - window + 1) // size
            for window, size in zip(limits.windows, limits.block_sizes, strict=True)
        ]

    def _draft(self, request: Request, drafts: dict[tuple[int, ...], list[int]]) -> list[int]:
        """Draft tokens, most of which are right, up to the request's last token at most."""
        known = drafts.get(tuple(request.prompt), [])[len(request.output) :]
        count = int(self._random.integers(0, 4))
        if most := self._runner.limits.num_speculative_tokens:
            return [-1] * min(count, most, request.max_tokens - len(request.output) - 1)
        own = [
            token if self._random.random() < 0.8 else int(self._random.integers(VOCAB_SIZE))
            for token in known[:count]
        ]
        return own[: request.max_tokens - len(request.output) - 1]

    def _extend(self, request: Request, num_tokens: int) -> list[list[int]]:
        added = [
            [self._pool.take() for _ in range(-(-num_tokens // size) - len(table))]
            for table, size in zip(request.tables, self._runner.limits.block_sizes, strict=True)
        ]
        for table, blocks in zip(request.tables, added, strict=True):
            table.extend(blocks)
        return added

    def _take(
        self, chosen: list[Request], counts: list[int], drafted: list[list[int]], output: StepOutput
    ) -> None:
        for index, rows in output.logprobs.items():
            chosen[index].prompt_rows += [] if rows.prompt is None else [rows.prompt]
            chosen[index].sampled_rows += [] if rows.sampled is None else [rows.sampled]
        first = 0
        for index, (request, count) in enumerate(zip(chosen, counts, strict=True)):
            num_sampled = int(output.num_tokens[index])
            samples = request.num_computed + count == len(request.tokens)
            assert (num_sampled > 0) == samples
            request.output += output.token_ids[first : first + num_sampled].tolist()
            first += num_sampled
            accepted = max(num_sampled - 1, 0)
            assert accepted <= len(drafted[index])
            self.happened.drafts += len(drafted[index])
            self.happened.accepted += accepted
            if request.row is not None and self._runner.limits.num_speculative_tokens:
                self._rejected[request.row] = len(drafted[index]) - accepted
            request.num_computed += count + accepted
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """Makes full blocks findable. Frees blocks that have left the window, now or later."""
        begins = self._first_seen(request.num_computed)
        sizes = self._runner.limits.block_sizes
        for group, (table, begin) in enumerate(zip(request.tables, begins, strict=True)):
            for block in range(request.num_computed // sizes[group]):
                if table[block]:
                    self._pool.remember(self._key(request, group, block), table[block])
            if self._random.random() < 0.8:
                self._pool.free(table[:begin])
                table[:begin] = [0] * begin
