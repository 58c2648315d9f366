"""The persistent batch: what the worker remembers of each running request between steps.

A request is sent once, in full, and takes a row. After that only differences arrive, and the
worker appends what it samples to its own copy of the tokens, so that a step can be planned and sent
before the one ahead of it has run. The idea is vLLM's persistent input batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.core.step import Int32Array, NewRequest, StepInput
from services.worker.core.step_check import StepCheck


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What the batch can hold, and what a step may ask for.

    `windows`: of each KV-cache group, the tokens that its layers see; None: all of them.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of a sequence of the greatest length."""
        return -(-self.max_model_len // self.block_size)

    def room(self, num_blocks: int) -> int:
        """Tokens of a sequence that so many blocks hold."""
        return min(num_blocks * self.block_size, self.max_model_len)


class PersistentBatch:
    """Rows with their tokens, block tables and sampling parameters.

    `apply` checks a step against the batch and only then changes it. Arrays are indexed by row:

    * `token_ids` int32 [max_num_seqs, max_model_len + 1], of which `num_tokens` are known: prompt,
      output so far, and what was sampled here since;
    * `num_prompt_tokens`;
    * `room`: tokens that a request's blocks hold, in the group with the fewest;
    * `block_tables` int32 [num_groups, max_num_seqs, max_blocks_per_seq], of which
      `num_blocks` [num_groups, max_num_seqs] are set. Where a window has moved on an entry is the
      null block or whatever it was before: nobody reads it.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        rows = limits.max_num_seqs
        self.token_ids = np.zeros((rows, limits.max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)
        self.num_prompt_tokens = np.zeros(rows, np.int32)
        self.room = np.zeros(rows, np.int32)
        num_groups = len(limits.windows)
        self.block_tables = np.zeros((num_groups, rows, limits.max_blocks_per_seq), np.int32)
        self.num_blocks = np.zeros((num_groups, rows), np.int32)
        self.sampling: dict[int, SamplingParams] = {}

    @property
    def rows(self) -> list[int]:
        """Rows in use."""
        return sorted(self.sampling)

    def clear(self) -> None:
        """Forgets every request."""
        self.sampling.clear()

    def apply(self, step: StepInput) -> None:
        """Takes over the difference that `step` brings. Raises InvalidStep, changing nothing."""
        StepCheck(self, step).run()
        for row in step.removed_rows.tolist():
            del self.sampling[row]
        for request in step.new_requests:
            self._enter(request)
        for group, appended in enumerate(step.appended_blocks):
            first = 0
            for row, count in zip(appended.rows, appended.num_blocks, strict=True):
                self._grow(group, row, appended.block_ids[first : first + count])
                first += count

    def append_one(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Adds one sampled token to each of some requests."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def append(self, row: int, token_ids: Sequence[int] | Int32Array) -> None:
        """Adds sampled tokens to a request's known ones."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def append_unknown(self, rows: Int32Array) -> None:
        """One more token of each of these requests; which one is not known here."""
        self.num_tokens[rows] += 1

    def _enter(self, request: NewRequest) -> None:
        row = request.row
        self.sampling[row] = request.sampling
        self.num_tokens[row] = 0
        self.num_blocks[:, row] = 0
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.append(row, request.token_ids)
        for group, block_ids in enumerate(request.block_tables):
            self._grow(group, row, block_ids)

    def _grow(self, group: int, row: int, block_ids: Int32Array) -> None:
        start = self.num_blocks[group, row]
        self.block_tables[group, row, start : start + len(block_ids)] = block_ids
        self.num_blocks[group, row] += len(block_ids)
        self.room[row] = self.limits.room(int(self.num_blocks[:, row].min()))
