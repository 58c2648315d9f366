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

import numpy as np
import torch

from services.worker.backends.attention import PagedAttention
from services.worker.backends.device import CpuDevice, Device
from services.worker.core.batch import BatchLimits, PersistentBatch
from services.worker.core.computed import Computed, SamplingRows, StepRows
from services.worker.core.decode_buckets import DecodeBuckets, is_decodes_alone
from services.worker.core.embedded_prompts import EmbeddedPrompts
from services.worker.core.layout import StepTokens, lay_out
from services.worker.core.lockstep import Lockstep
from services.worker.core.lookahead import Lookahead, PendingOutput
from services.worker.core.sampled import Sampled, joined
from services.worker.core.step import Int32Array, StepInput, StepOutput
from services.worker.models.model import Model, wanted_rows
from services.worker.sampling.sampler import LogprobRows, Sampler, prompt_logprobs

_PROMPT_LOGPROB_ROWS = 128
"""Prompt positions whose logits are held at once."""


class Runner:
    """Runs steps, one after the other, over one model, one cache and one batch. Not thread-safe.

    On a device that the host may run ahead of, `lookahead` keeps sampled tokens there, so that
    `begin` need not wait for them, and `buckets` run steps of decodes alone. With a `lockstep` each
    step is run together with the other ranks.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        limits: BatchLimits,
        device: Device | None = None,
        lookahead: Lookahead | None = None,
        buckets: DecodeBuckets | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._device = device or CpuDevice()
        self._lookahead = lookahead
        self._buckets = buckets
        self._lockstep = lockstep
        self._batch = PersistentBatch(limits)
        self._embedded = EmbeddedPrompts(model)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._generation: int | None = None
        self._prompt_watchers: set[int] = set()
        """Slots whose requests want log-probabilities of their prompts."""

    @property
    def limits(self) -> BatchLimits:
        """What it holds, and what a step may ask for."""
        return self._batch.limits

    def reset(self) -> None:
        """Empties the batch, in whatever state a failed step left it."""
        limits = self._batch.limits
        self._batch.clear()
        self._prompt_watchers.clear()
        self._embedded.clear()
        if self._lookahead is not None:
            self._lookahead.reset()
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)

    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step to its end. Raises as `begin` does."""
        output = self.begin(step)
        return output if isinstance(output, StepOutput) else output.wait()

    @torch.inference_mode()
    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs one step; where its tokens stay on the device, only queues it there.

        Raises InvalidArgument, with the batch unchanged, for a bad one; and as Lockstep does.
        """
        if self._lockstep is not None:
            return self._lockstep.run(step, self._begin)
        return self._begin(step)

    def _begin(self, step: StepInput) -> StepOutput | PendingOutput:
        if step.generation != self._generation:
            self.reset()
            self._generation = step.generation
        self._update_batch(step)
        if len(step.block_ids_to_zero):
            self._attention.zero_blocks(step.block_ids_to_zero)
        if not len(step.slots):
            empty = np.empty(0, np.int32)
            return StepOutput(step.generation, step.step, empty, empty)
        self._place_drafts(step)
        tokens = lay_out(step, self._batch)
        rows = _step_rows(step, tokens)
        sampling = rows.sampling(self._batch.num_tokens[rows.slots])
        computed = self._forward(step, tokens, sampling)
        prompt = self._prompt_logprobs(rows, computed)
        return self._sample(step, rows, sampling, computed, prompt)

    def _update_batch(self, step: StepInput) -> None:
        embedded = self._embedded.read(step, self._device.torch_device)
        self._batch.apply(step)
        self._embedded.replace(step, embedded)
        for slot in step.removed_slots.tolist():
            self._sampler.remove(slot)
            self._prompt_watchers.discard(slot)
        for new in step.new_requests:
            self._sampler.add(
                new.slot,
                new.sampling,
                new.token_ids,
                new.num_prompt_tokens,
                num_placeholders=new.num_placeholders,
            )
            if self._lookahead is not None:
                self._lookahead.know(np.array([new.slot]))
            if new.sampling.prompt_logprobs is not None:
                self._prompt_watchers.add(new.slot)

    def _forward(self, step: StepInput, tokens: StepTokens, sampling: SamplingRows) -> Computed:
        """Runs the model over the step's tokens, in the layout's order."""
        token_ids = self._device.upload(tokens.token_ids)
        if self._lookahead is not None:
            num_tokens = self._batch.num_tokens[step.slots]
            self._lookahead.feed(token_ids, step, tokens.first_tokens, num_tokens)
        embedded = self._embedded.of_step(step, tokens, token_ids)
        is_all = len(sampling.tokens) == len(tokens.token_ids)
        wanted = None if is_all else self._device.upload(sampling.tokens)
        if self._buckets is not None and embedded is None and is_decodes_alone(tokens.layouts[0]):
            logits = self._buckets.logits(token_ids, tokens.positions, tokens.layouts)
            return Computed(wanted_rows(logits, wanted), lambda some: logits[some])
        hidden, found = self._model.forward(
            token_ids,
            self._device.upload(tokens.positions),
            self._attention.begin_step(tokens.layouts),
            embedded,
            wanted,
        )
        if self._lockstep is not None:
            self._lockstep.saw(hidden)
        return Computed(found, lambda some: self._model.compute_logits(hidden[some]))

    def _place_drafts(self, step: StepInput) -> None:
        """Writes drafts behind the known tokens; they become known when they are accepted."""
        if not len(step.draft_token_ids):
            return
        first = 0
        for slot, count in zip(step.slots, step.num_draft_tokens, strict=False):
            known = self._batch.num_tokens[slot]
            drafts = step.draft_token_ids[first : first + count]
            self._batch.token_ids[slot, known : known + count] = drafts
            first += count

    def _sample(
        self,
        step: StepInput,
        rows: StepRows,
        sampling: SamplingRows,
        computed: Computed,
        prompt: dict[int, LogprobRows],
    ) -> StepOutput | PendingOutput:
        """Samples every request that is to be sampled; verifies its drafts."""
        sampled, logits = Sampled(), computed.logits
        if logits is not None:
            slots, order = rows.slots[sampling.requests], rows.order[sampling.requests]
            if self._may_look_ahead(rows, slots, prompt):
                return self._sample_ahead(step, order, slots, logits)
            if rows.num_draft_tokens is None:
                output = self._sampler.sample(logits, slots)
                sampled.add(order, output)
                self._batch.append_one(slots, output.token_ids)
            else:
                self._verify(rows, sampling, logits, sampled)
            if self._lookahead is not None:
                self._lookahead.know(slots)
        return sampled.output(step, prompt)

    def _verify(
        self,
        rows: StepRows,
        sampling: SamplingRows,
        logits: torch.Tensor,
        sampled: Sampled,
    ) -> None:
        """Samples token by token, of each request until one is not the draft at its position."""
        drafts = rows.num_draft_tokens
        assert drafts is not None
        known = rows.ends - drafts
        offset, active = 0, np.arange(len(sampling.requests))
        while len(active):
            indexes = sampling.requests[active]
            slots = rows.slots[indexes]
            wanted = logits[self._device.upload(sampling.firsts[active] + offset)]
            output = self._sampler.sample(wanted, slots)
            sampled.add(rows.order[indexes], output)
            guessed = self._batch.token_ids[slots, known[indexes] + offset]
            stands = (drafts[indexes] > offset) & (guessed == output.token_ids)
            stands[output.nan_rows] = False
            self._batch.append_one(slots, output.token_ids)
            active, offset = active[stands], offset + 1

    def _may_look_ahead(
        self, rows: StepRows, slots: Int32Array, prompt: dict[int, LogprobRows]
    ) -> bool:
        """Whether nothing that the device computes is needed here before the step is answered."""
        return (
            self._lookahead is not None
            and not prompt
            and rows.num_draft_tokens is None
            and self._sampler.is_simple(slots)
        )

    def _sample_ahead(
        self, step: StepInput, sampling: np.ndarray, slots: Int32Array, logits: torch.Tensor
    ) -> PendingOutput:
        assert self._lookahead is not None
        self._batch.expect(slots)
        num_logprobs = self._sampler.num_logprobs(slots)
        draws = self._sampler.draws(slots)
        return self._lookahead.sample(step, sampling, logits, draws, num_logprobs)

    def _prompt_logprobs(self, rows: StepRows, computed: Computed) -> dict[int, LogprobRows]:
        """Log-probabilities of prompt tokens that follow a position of this step, by request."""
        found: dict[int, LogprobRows] = {}
        if not self._prompt_watchers:
            return found
        starts = rows.ends - rows.num_scheduled_tokens
        ends = np.minimum(rows.ends, self._batch.num_prompt_tokens[rows.slots] - 1)
        for row in np.flatnonzero(starts < ends).tolist():
            slot, begin, end = rows.slots[row], starts[row], ends[row]
            num_top = self._batch.sampling[int(slot)].prompt_logprobs
            if num_top is None:
                continue
            targets = self._batch.token_ids[slot, begin + 1 : end + 1]
            first = int(rows.first_tokens[row])
            parts = []
            for start in range(0, end - begin, _PROMPT_LOGPROB_ROWS):
                stop = min(start + _PROMPT_LOGPROB_ROWS, end - begin)
                some = self._device.upload(np.arange(first + start, first + stop))
                logits = computed.logits_of(some)
                parts.append(prompt_logprobs(logits, targets[start:stop], num_top))
            found[int(rows.order[row])] = joined(parts)
        return found


def _step_rows(step: StepInput, tokens: StepTokens) -> StepRows:
    layout, drafts = tokens.layouts[0], step.num_draft_tokens
    return StepRows(
        tokens.order,
        layout.rows,
        layout.query_starts[:-1],
        layout.seq_lens,
        step.num_scheduled_tokens[tokens.order],
        drafts[tokens.order] if drafts.any() else None,
    )
