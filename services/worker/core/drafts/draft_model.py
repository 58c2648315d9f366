"""Proposes drafts from a draft model: a smaller model of the same vocabulary that decodes greedily.

The draft model's keys and values have the same block tables and slots as the target model's, in
blocks with memory for both. When a step fills a block, both models' keys and values are in it at
the end of the step. Therefore everything that reuses or copies full blocks works for both models:
prefix hits, resumption after a preemption, and the tier of host memory for offloaded blocks.

In a step that begins with n known tokens of a request:

1. The draft model computes the known tokens that it has not computed yet. For a prompt, these are
   the step's own chunk. For a decoding request, this is the last token. If all drafts of the
   previous step were accepted, these are the last two tokens, because the draft model never
   computes the last draft of a step.
2. The most likely next token is the first draft. Each further draft requires a run of the draft
   model over one token of each request. With k drafts, these runs write slots n to n + k - 2. These
   slots are allocated, because the target model verifies k drafts in the same step.
3. After verification, accepted drafts count as computed. The slots of rejected drafts are
   overwritten.
4. The draft model skips requests for which no drafts are requested. It computes their known tokens
   when these fill a block, or when drafts are requested again.

vLLM's method "draft_model" proposes drafts at the end of a step, and therefore needs additional
slots. Here they are proposed at the beginning of the step that verifies them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.backends.arrays import BoolArray, Int32Array
from services.worker.backends.attention import PagedAttention
from services.worker.core.batch.input_batch import BatchLimits, InputBatch
from services.worker.core.batch.layout import lay_out
from services.worker.core.drafts.draft_source import DraftSource, WantedDrafts
from services.worker.core.step import StepInput
from services.worker.models.model import Model, ModelInput


class DraftModel(DraftSource):
    """A DraftSource that runs a draft model on the CPU.

    `attention` has as many blocks as the target model's attention, with as many tokens in each
    block. `group` is the KV-cache group of the target model whose block tables are used. The group
    must keep the blocks of all tokens. `max_model_len` limits the draft model's sequences, in
    tokens. Longer requests have no drafts.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        limits: BatchLimits,
        *,
        group: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self._attention = attention
        self._group = group
        self._block_size = limits.block_sizes[group]
        self._max_model_len = max_model_len
        self._longest = limits.max_model_len
        rows, most = limits.max_num_seqs, limits.num_speculative_tokens
        self._num_computed = np.full(rows, self._longest, np.int32)
        """For each row of the batch, how many of its tokens the draft model has computed. For a new
        request this is an upper bound, until `_settle` lowers it to the number of tokens in full
        blocks.
        """
        self._guesses = np.zeros((rows, most), np.int32)
        """For each row, the drafts computed after the tokens that `_num_computed` counts."""
        self._num_guesses = np.zeros(rows, np.int32)

    def forget(self, rows: Int32Array) -> None:
        self._num_computed[rows] = self._longest
        self._num_guesses[rows] = 0

    def clear(self) -> None:
        self._num_computed[:] = self._longest
        self._num_guesses[:] = 0

    def propose(
        self, step: StepInput, batch: InputBatch, wanted: Sequence[WantedDrafts]
    ) -> list[list[int]]:
        """Proposes drafts. Also computes the tokens of requests that fill a block in this step."""
        rows = step.rows
        self._settle(rows, step.num_computed_tokens, batch)
        starts = self._num_computed[rows]
        ends = np.minimum(step.num_computed_tokens + step.num_scheduled_tokens, self._max_model_len)
        # For each request, how many drafts the model adds after the drafts that its grammar forces
        num_own = np.zeros(len(rows), np.int32)
        for want in wanted:
            known = batch.num_tokens[want.row]
            first = known + len(want.forced)
            batch.token_ids[want.row, known:first] = want.forced
            room = self._max_model_len + 1 - first
            if (count := min(want.most - len(want.forced), room)) > 0:
                num_own[want.index], ends[want.index] = count, first
        self._compute_due(batch, rows, starts, ends, num_own)
        return [self._take(batch, want, int(num_own[want.index])) for want in wanted]

    def verified(self, rows: Int32Array, batch: InputBatch) -> None:
        """Counts accepted drafts as computed, and computes known tokens that fill a block."""
        num_computed = batch.num_tokens[rows] - 1
        self._settle(rows, num_computed, batch)
        starts, ends = self._num_computed[rows], np.minimum(num_computed, self._max_model_len)
        self._compute_due(batch, rows, starts, ends, np.zeros(len(rows), np.int32))

    def _settle(self, rows: Int32Array, num_computed: Int32Array, batch: InputBatch) -> None:
        """Counts as computed the accepted drafts that the draft model has computed, and drops the
        others. `num_computed` is how many tokens the target model has computed. If the draft
        model's count is higher, it becomes the number of tokens in full blocks, because only full
        blocks are sure to have the keys and values of both models.
        """
        own, places = self._num_computed[rows], np.arange(self._guesses.shape[1])
        at = np.minimum(own[:, None] + places, batch.token_ids.shape[1] - 1)
        stand = batch.token_ids[rows[:, None], at] == self._guesses[rows]
        stand &= places < self._num_guesses[rows, None]
        own += np.logical_and.accumulate(stand, axis=1).sum(axis=1, dtype=np.int32)
        in_full_blocks = num_computed // self._block_size * self._block_size
        self._num_computed[rows] = np.where(own > num_computed, in_full_blocks, own)
        self._num_guesses[rows] = 0

    def _compute_due(
        self,
        batch: InputBatch,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
    ) -> None:
        """Computes tokens `starts` to `ends` of requests that need drafts or fill a block. Then
        writes `num_drafts` drafts after the tokens of each request.
        """
        fills_block = ends // self._block_size > starts // self._block_size
        due = np.flatnonzero(fills_block | (num_drafts > 0))
        if not len(due):
            return
        rows, starts, ends, num_drafts = rows[due], starts[due], ends[due], num_drafts[due]
        drafts = num_drafts > 0
        tokens = self._compute(batch, rows, starts, ends, drafts)
        self._num_computed[rows] = np.minimum(ends, batch.num_tokens[rows])
        self._draft(batch, rows[drafts], ends[drafts], num_drafts[drafts], tokens)

    def _draft(
        self,
        batch: InputBatch,
        rows: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        tokens: Int32Array,
    ) -> None:
        """Writes `num_drafts` drafts for each request, from position `ends` on. `tokens` are the
        first drafts. Each run of the draft model gives one more draft to each request.
        """
        while len(rows):
            batch.token_ids[rows, ends] = tokens
            more = num_drafts > 1
            rows, ends, num_drafts = rows[more], ends[more] + 1, num_drafts[more] - 1
            if len(rows):
                tokens = self._compute(batch, rows, ends - 1, ends, num_drafts > 0)

    def _compute(
        self,
        batch: InputBatch,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        samples: BoolArray,
    ) -> Int32Array:
        """Runs the draft model once over tokens `starts` to `ends` of each request. Returns the
        most likely next token of each request for which `samples` is true.
        """
        tokens = lay_out(StepInput(0, 0, rows, ends - starts, starts), batch)
        sampling = np.flatnonzero(samples[tokens.order])
        last_tokens = tokens.layouts[0].query_starts[1:][sampling].astype(np.int64) - 1
        given = ModelInput(
            torch.from_numpy(tokens.token_ids),
            torch.from_numpy(tokens.positions),
            self._attention.begin_step((tokens.layouts[self._group],)),
            wanted=torch.from_numpy(last_tokens),
        )
        _, logits = self.model.forward(given)
        found = np.zeros(len(rows), np.int32)
        if logits is not None:
            found[tokens.order[sampling]] = logits.numpy().argmax(axis=1)
        return found[samples]

    def _take(self, batch: InputBatch, want: WantedDrafts, num_own: int) -> list[int]:
        """Returns the drafts that were written for a request. Records that the draft model has
        computed all of them except the last one, or none if all are forced.
        """
        row, count = want.row, len(want.forced) + num_own
        known = batch.num_tokens[row]
        drafts: list[int] = batch.token_ids[row, known : known + count].tolist()
        if num_own:
            self._guesses[row, : count - 1] = drafts[:-1]
            self._num_guesses[row] = count - 1
        return drafts
