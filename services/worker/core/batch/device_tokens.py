"""Stores sampled tokens on the device, so that the host does not wait for them between steps.

A step samples on the device, stores the last token of each row (request) of the batch there, and
starts a download. While this step runs, the next step is planned and queued. Its input tokens are
copied within the device. In two cases tokens are sampled on the host: if their logits are edited
there, and if they verify drafts.
"""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.backends.device import Device, Download
from services.worker.backends.row_sampler import UNUSABLE
from services.worker.core.batch.layout import StepTokens
from services.worker.core.errors import InvalidStep
from services.worker.core.step import StepInput, no_ints
from services.worker.sampling.device_logprobs import PendingLogprobs, logprobs_on_device
from services.worker.sampling.device_sampler import sample_on_device
from services.worker.sampling.sampler import SamplerOutput, SamplingMetadata


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The tokens sampled in one step, one for each sampled request. The device may still be
    sampling them.

    `logprobs` is None if no request needs log-probabilities.
    """

    token_ids: Download
    logprobs: PendingLogprobs | None

    def wait(self) -> SamplerOutput:
        """Waits for the device. Callable from any thread, and repeatedly."""
        token_ids = self.token_ids.wait()
        is_usable = token_ids != UNUSABLE
        found = {} if self.logprobs is None else self.logprobs.wait()
        return SamplerOutput(
            np.where(is_usable, token_ids, 0).astype(np.int32),
            {row: rows for row, rows in found.items() if is_usable[row]},
            nan_rows=np.flatnonzero(~is_usable).astype(np.int32),
            refused_rows=no_ints(),
        )


class DeviceTokens:
    """The last token of each row of the batch whose last token was sampled on the device.

    With `by_row`, rows of logits are sampled one at a time, because on a GPU the summation order
    within a row depends on the number of rows.
    """

    def __init__(self, device: Device, max_num_seqs: int, *, by_row: bool = False) -> None:
        self._device = device
        self._by_row = by_row
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch_device)
        self._is_held = np.zeros(max_num_seqs, np.bool_)

    def reset(self) -> None:
        self._is_held[:] = False

    def release(self, rows: np.ndarray) -> None:
        """Drops the tokens of these rows. Called when the host knows their last tokens."""
        self._is_held[rows] = False

    def fill_in(
        self, token_ids: torch.Tensor, step: StepInput, tokens: StepTokens, num_tokens: Int32Array
    ) -> None:
        """Writes last tokens that only the device has into the step's `token_ids`, in place.

        `num_tokens` has the number of tokens of each request, in the order of `tokens`. Raises
        InvalidStep for a request that must compute an earlier token than such a last token.
        """
        held = np.flatnonzero(self._is_held[tokens.rows])
        if not len(held):
            return
        behind = held[(tokens.num_computed_tokens != num_tokens - 1)[held]]
        if len(behind):
            problem = (
                f"row {tokens.rows[behind[0]]} computes tokens again whose ids only the device has"
            )
            raise InvalidStep.in_field(step.step, "num_computed_tokens", problem)
        rows = self._device.upload(tokens.rows[held].astype(np.int64))
        indexes = self._device.upload(tokens.first_tokens[held].astype(np.int64))
        token_ids.index_copy_(0, indexes, self._last_tokens.index_select(0, rows))

    def sample(
        self,
        rows: Int64Array,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        num_logprobs: dict[int, int],
    ) -> PendingTokens:
        """Samples one token for each of `rows` of the batch. Row i of the logits is for rows[i].

        `num_logprobs` maps indexes of logits rows to the number of most likely tokens to report.
        Rows without log-probabilities are absent.
        """
        token_ids = self._sampled(logits, metadata)
        self._last_tokens.index_copy_(0, self._device.upload(rows), token_ids.clamp(min=0))
        self._is_held[rows] = True
        logprobs = None
        if num_logprobs:
            logprobs = logprobs_on_device(
                logits, token_ids, num_logprobs, self._device, by_row=self._by_row
            )
        return PendingTokens(self._device.download(token_ids), logprobs)

    def _sampled(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        if not self._by_row or not metadata.temperatures.any():
            return sample_on_device(logits, metadata, self._device)
        rows = [slice(row, row + 1) for row in range(len(logits))]
        sampled = [sample_on_device(logits[row], metadata.of(row), self._device) for row in rows]
        return torch.cat(sampled)
