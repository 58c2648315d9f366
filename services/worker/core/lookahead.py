"""Tokens that stay on the device, so that the host need not wait for them between two steps.

A step samples where its logits are, keeps the token of each row there, and starts a download.
The next step takes what it needs from there: it is planned, laid out and queued while this one
runs. What is sampled on the host, because it needs more than a draw, is known here as ever.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from services.worker.backends.cuda.logprobs import PendingLogprobs, logprobs_on_device
from services.worker.backends.cuda.sampler import UNUSABLE, sample_on_device
from services.worker.backends.device import Device, Download
from services.worker.core.errors import InvalidStep
from services.worker.core.step import Int32Array, RequestLogprobs, StepInput, StepOutput
from services.worker.sampling.sampler import Draws


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """The answer to a step that the device may still be running.

    `sampling`: indexes of the requests that get a token, one each, in the order of `token_ids`.
    `logprobs` where some ask for them, by index among those.
    """

    step: StepInput
    sampling: np.ndarray
    token_ids: Download
    logprobs: PendingLogprobs | None

    def wait(self) -> StepOutput:
        """The answer, once it is there. May be called from any thread."""
        token_ids = self.token_ids.wait()
        is_usable = token_ids != UNUSABLE
        num_tokens = np.zeros(len(self.step.rows), np.int32)
        num_tokens[self.sampling] = 1
        by_request = self.sampling.argsort()
        return StepOutput(
            self.step.generation,
            self.step.step,
            num_tokens,
            np.where(is_usable, token_ids, 0)[by_request].astype(np.int32),
            logprobs=self._logprobs(is_usable),
            nan_requests=np.sort(self.sampling[~is_usable]).astype(np.int32),
        )

    def _logprobs(self, is_usable: np.ndarray) -> dict[int, RequestLogprobs]:
        """By request, in the step's order."""
        if self.logprobs is None:
            return {}
        found = self.logprobs.wait()
        return {
            int(self.sampling[row]): RequestLogprobs(found[row], None)
            for row in sorted(found, key=lambda row: self.sampling[row])
            if is_usable[row]
        }


class Lookahead:
    """The last token of each row, on the device, where it was sampled there.

    `by_row`: rows are sampled, and their log-probabilities computed, one after the other: on a GPU
    the order in which a row is summed depends on how many there are.
    """

    def __init__(self, device: Device, max_num_seqs: int, *, by_row: bool = False) -> None:
        self._device = device
        self._by_row = by_row
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch_device)
        self._is_ahead = np.zeros(max_num_seqs, np.bool_)

    def reset(self) -> None:
        """Forgets every row."""
        self._is_ahead[:] = False

    def know(self, rows: np.ndarray) -> None:
        """The last tokens of these rows are known on the host."""
        self._is_ahead[rows] = False

    def feed(
        self,
        token_ids: torch.Tensor,
        step: StepInput,
        first_tokens: Int32Array,
        num_tokens: Int32Array,
    ) -> None:
        """Puts last tokens that are only here among a step's token ids, in place.

        `first_tokens`: where each request of the step begins among them; `num_tokens`: how many
        tokens each has. Raises InvalidStep for a request that computes tokens before its last,
        which the host never learned.
        """
        ahead = np.flatnonzero(self._is_ahead[step.rows])
        behind = ahead[step.num_computed_tokens[ahead] != num_tokens[ahead] - 1]
        if len(behind):
            raise InvalidStep(
                f"step {step.step}: num_computed_tokens: row {step.rows[behind[0]]} computes "
                "tokens again that it has sampled",
                field="num_computed_tokens",
            )
        if len(ahead):
            rows = self._device.upload(step.rows[ahead].astype(np.int64))
            places = self._device.upload(first_tokens[ahead].astype(np.int64))
            token_ids.index_copy_(0, places, self._last_tokens.index_select(0, rows))

    def sample(
        self,
        step: StepInput,
        sampling: np.ndarray,
        logits: torch.Tensor,
        draws: Draws,
        num_logprobs: dict[int, int],
    ) -> PendingOutput:
        """One token of each request `sampling`, in the order of the logits' rows. `num_logprobs`:
        of the rows that want log-probabilities, how many of the most probable tokens.
        """
        rows = step.rows[sampling].astype(np.int64)
        token_ids = self._sampled(logits, draws)
        self._last_tokens.index_copy_(0, self._device.upload(rows), token_ids.clamp(min=0))
        self._is_ahead[rows] = True
        logprobs = None
        if num_logprobs:
            logprobs = logprobs_on_device(
                logits, token_ids, num_logprobs, self._device, by_row=self._by_row
            )
        return PendingOutput(step, sampling, self._device.download(token_ids), logprobs)

    def _sampled(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        if not self._by_row or not draws.temperatures.any():
            return sample_on_device(logits, draws, self._device)
        arrays = {field.name: getattr(draws, field.name) for field in fields(draws)}
        rows = [slice(row, row + 1) for row in range(len(logits))]
        return torch.cat(
            [
                sample_on_device(
                    logits[row],
                    Draws(**{name: array[row] for name, array in arrays.items()}),
                    self._device,
                )
                for row in rows
            ]
        )
