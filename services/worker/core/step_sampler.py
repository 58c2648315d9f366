"""Samples the tokens of a step, and verifies its drafts.

A draft token is accepted if the sampler draws the same token at its position. The first draft that
differs is replaced by the drawn token. A draw is a function of seed, position and logits, so the
output has the same tokens as without drafts. A draft is accepted with the probability that the
model assigns to it. Rejection sampling (Leviathan et al.) accepts drafts at the same rate if they
are proposed with certainty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.device import Device
from services.worker.backends.row_sampler import RowSampler
from services.worker.core.batch.device_tokens import DeviceTokens, PendingTokens
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.batch.layout import SamplingRequests, StepTokens
from services.worker.core.sampled import PendingOutput, Sampled, SampledOnDevice
from services.worker.core.step import StepInput, StepOutput
from services.worker.sampling.grammar import Grammars
from services.worker.sampling.logprobs import LogprobRows, logprob_rows
from services.worker.sampling.sampler import Sampler, SamplerOutput

_PROMPT_LOGPROB_ROWS = 128
"""Maximum number of prompt positions whose logits are computed at once."""


@dataclass(eq=False)
class StepSampler:
    """Samples tokens for the requests of a batch, and appends them to the batch.

    `device_tokens` samples on the device, for requests whose tokens the host does not need at once.
    `row_sampler` draws tokens on the host (see Sampler).
    """

    batch: InputBatch
    device: Device
    device_tokens: DeviceTokens | None
    grammars: Grammars | None
    row_sampler: RowSampler | None = None
    _num_prompt_logprobs: dict[int, int] = field(init=False, default_factory=dict)
    """For rows of the batch with prompt log-probabilities, the number of most likely tokens to
    report at each prompt position.
    """

    def __post_init__(self) -> None:
        self._sampler = self._new_sampler()

    def clear(self) -> None:
        self._num_prompt_logprobs.clear()
        self._sampler = self._new_sampler()

    @property
    def forced_tokens(self) -> Callable[[int], Sequence[int]]:
        """A function that returns the tokens that the grammar of a row's request forces next."""
        return self._sampler.forced_tokens

    def update(self, step: StepInput) -> None:
        for row in step.removed_rows.tolist():
            self._sampler.remove(row)
            self._num_prompt_logprobs.pop(row, None)
        for new in step.new_requests:
            prompt = (new.token_ids, new.num_prompt_tokens)
            self._sampler.add(new.row, new.sampling, *prompt, num_placeholders=new.num_placeholders)
            if self.device_tokens is not None:
                self.device_tokens.release(np.array([new.row]))
            if new.sampling.prompt_logprobs is not None:
                self._num_prompt_logprobs[new.row] = new.sampling.prompt_logprobs

    def sample(
        self,
        step: StepInput,
        tokens: StepTokens,
        sampling: SamplingRequests,
        logits: torch.Tensor | None,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> StepOutput | PendingOutput:
        """Samples the next tokens, and verifies drafts.

        `logits` [n, vocab_size] are the logits at the positions in `sampling`, or None if there are
        no positions. `logits_of` computes the logits at other indexes of the step's tokens.
        """
        prompt = self._prompt_logprobs(tokens, logits_of)
        sampled = Sampled()
        if logits is None:
            return sampled.output(step, prompt)
        rows, order = tokens.rows[sampling.requests], tokens.order[sampling.requests]
        if tokens.num_draft_tokens is not None:
            self._verify(tokens, sampling, tokens.num_draft_tokens, logits, sampled)
        elif self.device_tokens is None:
            sampled.add(order, self._sample_on_host(rows, logits))
        else:
            here = self._sampler.constrained(rows)
            there = np.delete(np.arange(len(rows)), here)
            pending = None
            if len(there):  # queued first, because the host then waits for its logits
                of_rows = self._of_rows(logits, there)
                pending = self._sample_on_device(self.device_tokens, rows[there], of_rows)
            if len(here):
                output = self._sample_on_host(rows[here], self._of_rows(logits, here))
                sampled.add(order[here], output)
            if pending is not None:
                return SampledOnDevice(step, sampled, order[there], pending, prompt)
        return sampled.output(step, prompt)

    def _sample_on_host(self, rows: Int64Array, logits: torch.Tensor) -> SamplerOutput:
        output = self._sampler.sample(logits, rows)
        self._append(rows, output.token_ids)
        return output

    def _sample_on_device(
        self, device_tokens: DeviceTokens, rows: Int64Array, logits: torch.Tensor
    ) -> PendingTokens:
        self.batch.append_unknown(rows)
        num_logprobs = self._sampler.num_logprobs(rows)
        return device_tokens.sample(
            rows, logits, self._sampler.sampling_metadata(rows), num_logprobs
        )

    def _of_rows(self, logits: torch.Tensor, indexes: np.ndarray) -> torch.Tensor:
        if len(indexes) == len(logits):
            return logits
        return logits.index_select(0, self.device.upload(indexes))

    def _append(self, rows: Int64Array, token_ids: Int32Array) -> None:
        self.batch.append_one(rows, token_ids)
        if self.device_tokens is not None:
            self.device_tokens.release(rows)

    def _verify(
        self,
        tokens: StepTokens,
        sampling: SamplingRequests,
        num_draft_tokens: Int32Array,
        logits: torch.Tensor,
        sampled: Sampled,
    ) -> None:
        """Samples tokens for each request, until a token differs from the draft at its position.
        Requests whose draws do not depend on earlier tokens are sampled at all positions at once.
        """
        logits = logits.cpu()
        known = tokens.seq_lens - num_draft_tokens
        counts = num_draft_tokens[sampling.requests] + 1
        ahead = np.arange(len(logits)) - np.repeat(sampling.firsts, counts)
        of_logits = np.repeat(tokens.rows[sampling.requests], counts)
        drawn = self._sampler.draw_ahead(logits, of_logits, ahead)
        offset, active = 0, np.arange(len(sampling.requests))
        while len(active):
            indexes = sampling.requests[active]
            rows = tokens.rows[indexes]
            at = sampling.firsts[active] + offset
            output = self._sampler.sample(logits, rows, at, None if drawn is None else drawn[at])
            sampled.add(tokens.order[indexes], output)
            drafts = self.batch.token_ids[rows, known[indexes] + offset]
            accepted = (num_draft_tokens[indexes] > offset) & (drafts == output.token_ids)
            accepted[output.nan_rows] = accepted[output.refused_rows] = False
            self._append(rows, output.token_ids)
            active, offset = active[accepted], offset + 1

    def _prompt_logprobs(
        self, tokens: StepTokens, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, LogprobRows]:
        """Maps requests to the log-probabilities of the prompt tokens after this step's tokens."""
        found: dict[int, LogprobRows] = {}
        if not self._num_prompt_logprobs:
            return found
        starts = tokens.num_computed_tokens
        ends = np.minimum(tokens.seq_lens, self.batch.num_prompt_tokens[tokens.rows] - 1)
        for index in np.flatnonzero(starts < ends).tolist():
            row, begin, end = int(tokens.rows[index]), starts[index], ends[index]
            num_top = self._num_prompt_logprobs.get(row)
            if num_top is None:
                continue
            targets = self.batch.token_ids[row, begin + 1 : end + 1]
            indexes = int(tokens.first_tokens[index]) + np.arange(end - begin)
            parts = []
            for start in range(0, end - begin, _PROMPT_LOGPROB_ROWS):
                some = slice(start, start + _PROMPT_LOGPROB_ROWS)
                logits = logits_of(self.device.upload(indexes[some])).numpy(force=True)
                parts.append(logprob_rows(logits, targets[some], num_top))
            found[int(tokens.order[index])] = LogprobRows.joined(parts)
        return found

    def _new_sampler(self) -> Sampler:
        limits = self.batch.limits
        return Sampler(limits.max_num_seqs, limits.vocab_size, self.grammars, self.row_sampler)
