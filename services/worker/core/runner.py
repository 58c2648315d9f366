"""The runner: one step from a difference of the batch to sampled tokens.

 1. The persistent batch takes over the difference.
 2. Requests are put in the order that attention wants: single tokens by length, then chunks.
 3. The model runs once over all scheduled tokens.
 4. Only positions that are sampled, or whose prompt log-probabilities are asked for, meet the
    vocabulary.
 5. Sampled tokens join the batch, so that the next step needs nothing from outside.

A draft token stands if it is the token that the sampler takes at its position; the first that is
not is replaced by the sampler's own. Draws being a function of seed and position, the output is
the one without drafts, token for token, and a draft is accepted with the probability that the
model gives it: the rate of rejection sampling (Leviathan et al.) for drafts that are certain.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.worker.attention.interface import LayerAttention, PagedAttention, StepLayout
from services.worker.core.batch import BatchLimits, PersistentBatch
from services.worker.core.sampled import Sampled, joined
from services.worker.core.step import Int32Array, StepInput, StepOutput
from services.worker.sampling.sampler import LogprobRows, Sampler, prompt_logprobs

_PROMPT_LOGPROB_ROWS = 128
"""Prompt positions whose logits are held at once."""


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention
    ) -> torch.Tensor:
        """Token ids and positions, int64 [n] -> hidden states [n, hidden_size]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] -> logits, float32 [n, vocab_size]."""
        ...


@dataclass(frozen=True, slots=True)
class _Rows:
    """The requests of a step, in its order. `first_tokens`: where each starts among its tokens."""

    slots: Int32Array
    num_computed_tokens: Int32Array
    num_scheduled_tokens: Int32Array
    num_draft_tokens: Int32Array
    first_tokens: Int32Array

    @property
    def ends(self) -> Int32Array:
        """Tokens that each request has once the step is done, drafts included."""
        return self.num_computed_tokens + self.num_scheduled_tokens


class Runner:
    """Runs steps, one after the other, over one model, one cache and one batch. Not thread-safe."""

    def __init__(self, model: Model, attention: PagedAttention, limits: BatchLimits) -> None:
        self._model = model
        self._attention = attention
        self._batch = PersistentBatch(limits)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._generation: int | None = None

    def reset(self) -> None:
        """Empties the batch."""
        for slot in self._batch.slots:
            self._sampler.remove(slot)
        self._batch.clear()

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step. Raises InvalidArgument, with the batch unchanged, for a bad one."""
        if step.generation != self._generation:
            self.reset()
            self._generation = step.generation
        self._update_batch(step)
        if not len(step.slots):
            empty = np.empty(0, np.int32)
            return StepOutput(step.generation, step.step, empty, empty)
        rows, hidden = self._forward(step)
        prompt = self._prompt_logprobs(rows, hidden)
        return self._sample(step, rows, hidden, prompt)

    def _update_batch(self, step: StepInput) -> None:
        self._batch.apply(step)
        for slot in step.removed_slots.tolist():
            self._sampler.remove(slot)
        for new in step.new_requests:
            self._sampler.add(new.slot, new.sampling, new.token_ids, new.num_prompt_tokens)

    def _forward(self, step: StepInput) -> tuple[_Rows, torch.Tensor]:
        """Runs the model over the step's tokens; hidden states come in the layout's order."""
        counts, computed = step.num_scheduled_tokens, step.num_computed_tokens
        drafts = step.num_draft_tokens if len(step.num_draft_tokens) else np.zeros_like(counts)
        self._place_drafts(step)
        is_decode = counts == 1
        order = np.lexsort((np.where(is_decode, computed, 0), ~is_decode))
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts[order], out=starts[1:])
        first_tokens = np.empty_like(counts)
        first_tokens[order] = starts[:-1]

        batch, block_size = self._batch, self._batch.limits.block_size
        slots = np.repeat(step.slots[order], counts[order])
        offsets = np.repeat(computed[order] - starts[:-1], counts[order])
        positions = offsets.astype(np.int64) + np.arange(len(slots))
        blocks = batch.block_tables[slots, positions // block_size].astype(np.int64)
        ends = (computed + counts)[order]
        width = -(-int(ends.max()) // block_size)
        layout = StepLayout(
            num_decodes=int(is_decode.sum()),
            query_starts=starts,
            seq_lens=ends,
            block_tables=batch.block_tables[step.slots[order], :width],
            slot_mapping=blocks * block_size + positions % block_size,
        )
        hidden = self._model.forward(
            torch.from_numpy(batch.token_ids[slots, positions].astype(np.int64)),
            torch.from_numpy(positions),
            self._attention.begin_step(layout),
        )
        return _Rows(step.slots, computed, counts, drafts, first_tokens), hidden

    def _place_drafts(self, step: StepInput) -> None:
        """Writes drafts behind the known tokens; they become known when they are accepted."""
        first = 0
        for slot, count in zip(step.slots, step.num_draft_tokens, strict=False):
            known = self._batch.num_tokens[slot]
            drafts = step.draft_token_ids[first : first + count]
            self._batch.token_ids[slot, known : known + count] = drafts
            first += count

    def _sample(
        self,
        step: StepInput,
        rows: _Rows,
        hidden: torch.Tensor,
        prompt: dict[int, LogprobRows],
    ) -> StepOutput:
        """Samples every request whose last known token was computed; verifies its drafts."""
        known = rows.ends - rows.num_draft_tokens
        sampling = np.flatnonzero(known == self._batch.num_tokens[rows.slots])
        sampled = Sampled(len(rows.slots))
        if len(sampling):
            logits, first_rows = self._sampled_logits(rows, hidden, sampling)
            offset, active = 0, np.arange(len(sampling))
            while len(active):
                indexes = sampling[active]
                if len(active) < len(logits):
                    wanted = logits[torch.from_numpy(first_rows[active] + offset)]
                else:
                    wanted = logits
                output = self._sampler.sample(wanted, rows.slots[indexes])
                sampled.add(indexes, output.token_ids, output.logprobs, output.nan_rows)
                drafts_left = rows.num_draft_tokens[indexes] > offset
                drafts = self._batch.token_ids[rows.slots[indexes], known[indexes] + offset]
                stands = drafts_left & (drafts == output.token_ids)
                stands[output.nan_rows] = False
                active, offset = active[stands], offset + 1
            for index in sampling.tolist():
                self._batch.append(int(rows.slots[index]), sampled.token_ids[index])
        return sampled.output(step, prompt)

    def _sampled_logits(
        self, rows: _Rows, hidden: torch.Tensor, sampling: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Logits of each sampling request's last known token and of its drafts, and where they
        begin for each.
        """
        counts = rows.num_draft_tokens[sampling] + 1
        last = rows.first_tokens[sampling] + rows.num_scheduled_tokens[sampling]
        first_rows = np.cumsum(counts) - counts
        wanted = np.repeat(last - counts - first_rows, counts) + np.arange(counts.sum())
        return self._model.compute_logits(hidden[torch.from_numpy(wanted)]), first_rows

    def _prompt_logprobs(self, rows: _Rows, hidden: torch.Tensor) -> dict[int, LogprobRows]:
        """Log-probabilities of prompt tokens that follow a position of this step, by request."""
        found = {}
        ends = np.minimum(rows.ends, self._batch.num_prompt_tokens[rows.slots] - 1)
        for index in np.flatnonzero(rows.num_computed_tokens < ends).tolist():
            slot, begin, end = rows.slots[index], rows.num_computed_tokens[index], ends[index]
            num_top = self._batch.sampling[int(slot)].prompt_logprobs
            if num_top is None:
                continue
            targets = self._batch.token_ids[slot, begin + 1 : end + 1]
            first = int(rows.first_tokens[index])
            parts = []
            for start in range(0, end - begin, _PROMPT_LOGPROB_ROWS):
                stop = min(start + _PROMPT_LOGPROB_ROWS, end - begin)
                logits = self._model.compute_logits(hidden[first + start : first + stop])
                parts.append(prompt_logprobs(logits, targets[start:stop], num_top))
            found[index] = joined(parts)
        return found
