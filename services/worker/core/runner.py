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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.attention.interface import PagedAttention
from services.worker.core.batch import BatchLimits, PersistentBatch
from services.worker.core.decode_buckets import DecodeBuckets, is_decodes_alone
from services.worker.core.embedded_prompts import EmbeddedPrompts
from services.worker.core.layout import lay_out
from services.worker.core.lockstep import Lockstep
from services.worker.core.lookahead import Lookahead, PendingOutput
from services.worker.core.sampled import Sampled, joined
from services.worker.core.step import Int32Array, StepInput, StepOutput
from services.worker.device import CpuDevice, Device
from services.worker.models.model import Model
from services.worker.sampling.sampler import LogprobRows, Sampler, prompt_logprobs

_PROMPT_LOGPROB_ROWS = 128
"""Prompt positions whose logits are held at once."""


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
        rows, computed = self._forward(step)
        prompt = self._prompt_logprobs(rows, computed)
        return self._sample(step, rows, computed, prompt)

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

    def _forward(self, step: StepInput) -> tuple[_Rows, "_Computed"]:
        """Runs the model over the step's tokens, in the layout's order."""
        self._place_drafts(step)
        tokens = lay_out(step, self._batch)
        token_ids = self._device.upload(tokens.token_ids)
        if self._lookahead is not None:
            num_tokens = self._batch.num_tokens[step.slots]
            self._lookahead.feed(token_ids, step, tokens.first_tokens, num_tokens)
        embedded = self._embedded.of_step(step, tokens, token_ids)
        if self._buckets is not None and embedded is None and is_decodes_alone(tokens.layouts[0]):
            logits = self._buckets.logits(token_ids, tokens.positions, tokens.layouts)
            computed = _Computed(self._device, lambda rows: logits[rows])
        else:
            hidden = self._model.forward(
                token_ids,
                self._device.upload(tokens.positions),
                self._attention.begin_step(tokens.layouts),
                embedded,
            )
            if self._lockstep is not None:
                self._lockstep.saw(hidden)
            computed = _Computed(
                self._device, lambda rows: self._model.compute_logits(hidden[rows])
            )
        counts, drafts = step.num_scheduled_tokens, step.num_draft_tokens
        rows = _Rows(
            step.slots,
            step.num_computed_tokens,
            counts,
            drafts if len(drafts) else np.zeros_like(counts),
            tokens.first_tokens,
        )
        return rows, computed

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
        computed: "_Computed",
        prompt: dict[int, LogprobRows],
    ) -> StepOutput | PendingOutput:
        """Samples every request whose last known token was computed; verifies its drafts."""
        known = rows.ends - rows.num_draft_tokens
        sampling = np.flatnonzero(known == self._batch.num_tokens[rows.slots])
        sampled = Sampled(len(rows.slots))
        if len(sampling):
            logits, first_rows = self._sampled_logits(rows, computed, sampling)
            if self._may_look_ahead(rows, sampling, prompt):
                return self._sample_ahead(step, sampling, logits)
            offset, active = 0, np.arange(len(sampling))
            while len(active):
                indexes = sampling[active]
                if len(active) < len(logits):
                    wanted = logits[self._device.upload(first_rows[active] + offset)]
                else:
                    wanted = logits
                output = self._sampler.sample(wanted, rows.slots[indexes])
                sampled.add(indexes, output.token_ids, output.logprobs, output.nan_rows)
                drafts_left = rows.num_draft_tokens[indexes] > offset
                drafts = self._batch.token_ids[rows.slots[indexes], known[indexes] + offset]
                stands = drafts_left & (drafts == output.token_ids)
                stands[output.nan_rows] = False
                self._batch.append_one(rows.slots[indexes], output.token_ids)
                active, offset = active[stands], offset + 1
            if self._lookahead is not None:
                self._lookahead.know(rows.slots[sampling])
        return sampled.output(step, prompt)

    def _may_look_ahead(
        self, rows: _Rows, sampling: np.ndarray, prompt: dict[int, LogprobRows]
    ) -> bool:
        """Whether nothing that the device computes is needed here before the step is answered."""
        return (
            self._lookahead is not None
            and not prompt
            and not rows.num_draft_tokens.any()
            and self._sampler.is_simple(rows.slots[sampling])
        )

    def _sample_ahead(
        self, step: StepInput, sampling: np.ndarray, logits: torch.Tensor
    ) -> PendingOutput:
        assert self._lookahead is not None
        slots = step.slots[sampling]
        self._batch.expect(slots)
        num_logprobs = self._sampler.num_logprobs(slots)
        draws = self._sampler.draws(slots)
        return self._lookahead.sample(step, sampling, logits, draws, num_logprobs)

    def _sampled_logits(
        self, rows: _Rows, computed: "_Computed", sampling: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Logits of each sampling request's last known token and of its drafts, and where they
        begin for each.
        """
        counts = rows.num_draft_tokens[sampling] + 1
        last = rows.first_tokens[sampling] + rows.num_scheduled_tokens[sampling]
        first_rows = np.cumsum(counts) - counts
        wanted = np.repeat(last - counts - first_rows, counts) + np.arange(counts.sum())
        return computed.logits(wanted), first_rows

    def _prompt_logprobs(self, rows: _Rows, computed: "_Computed") -> dict[int, LogprobRows]:
        """Log-probabilities of prompt tokens that follow a position of this step, by request."""
        found: dict[int, LogprobRows] = {}
        if not self._prompt_watchers:
            return found
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
                logits = computed.logits(np.arange(first + start, first + stop))
                parts.append(prompt_logprobs(logits, targets[start:stop], num_top))
            found[index] = joined(parts)
        return found


class _Computed:
    """What the model made of a step's tokens."""

    def __init__(self, device: Device, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._device = device
        self._logits_of = logits_of

    def logits(self, rows: np.ndarray) -> torch.Tensor:
        """Logits, float32 [len(rows), vocab_size], of some of the tokens, in the layout's order."""
        return self._logits_of(self._device.upload(rows))
