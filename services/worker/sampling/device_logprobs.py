"""Log-probabilities computed on the device, and copied to the host in one piece.

Tokens are ordered as on the host: best first, and the lowest id first among equals. Ranks follow
this order. The device adds in another order than the host, so the last bits may differ.
"""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.device import Device, Download
from services.worker.sampling.logprobs import LogprobRows

_WORD = 2**32


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of sampled tokens that are being copied to the host.

    `num_top` maps the rows whose log-probabilities are reported to the number of most probable
    tokens. `numbers`: float64 [rows, 2 * width + 1]. A row has `width` token ids, the sampled one
    first, then their log-probabilities, then the sampled token's rank.
    """

    num_top: dict[int, int]
    numbers: Download

    def wait(self) -> dict[int, LogprobRows]:
        """Waits for the copy. Maps each row of `num_top` to its log-probabilities."""
        numbers = self.numbers.wait()
        width = numbers.shape[1] // 2
        return {
            row: LogprobRows(
                line[None, : 1 + num_top].astype(np.int32),
                line[None, width : width + 1 + num_top].astype(np.float32),
                line[-1:].astype(np.int32),
            )
            for (row, num_top), line in zip(self.num_top.items(), numbers, strict=True)
        }


def logprobs_on_device(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: dict[int, int],
    device: Device,
    *,
    by_row: bool = False,
) -> PendingLogprobs:
    """Returns log-probabilities for the rows in `num_top`, which must not be empty. `logits`:
    float32 [R, V]. `token_ids`: the tokens sampled from the logits, int64 [R]. Results are
    undefined for a row whose logits contain NaN, or no finite number.

    With `by_row`, rows are computed one at a time, so that the order of sums does not depend on the
    number of rows.
    """
    if len(num_top) < len(logits):
        rows = device.upload(np.fromiter(num_top, np.int64))
        logits, token_ids = logits[rows], token_ids[rows]
    most = max(num_top.values())
    size = 1 if by_row else len(logits)
    parts = zip(torch.split(logits, size), torch.split(token_ids, size), strict=True)
    numbers = torch.cat([_numbers(*part, most) for part in parts])
    return PendingLogprobs(num_top, device.download(numbers))


def _numbers(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    sampled = token_ids.clamp(min=0).unsqueeze(1)
    ids = torch.cat((sampled, _best(logits, num_top)), dim=1)
    largest = logits.amax(dim=1, keepdim=True)
    sums = torch.exp(logits - largest).sum(dim=1, keepdim=True, dtype=torch.float64)
    normalizers = (largest + sums.log()).float()
    logprobs = logits.gather(1, ids) - normalizers
    value, token = logits.gather(1, sampled), torch.arange(logits.shape[1], device=logits.device)
    better = (logits > value) | ((logits == value) & (token < sampled))
    ranks = 1 + better.sum(dim=1, keepdim=True)
    return torch.cat((ids, logprobs.double(), ranks), 1)


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the `count` best tokens of each row, best first, int64 [R, count].

    topk may return any of several equal numbers, so each logit is converted to a distinct 64-bit
    integer. The high word contains the logit's bits, changed so that integers are ordered like
    logits. The low word is larger for lower token ids.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # makes -0.0 equal 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    from_end = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    best = (ordered * _WORD + from_end).topk(min(count, vocab_size), dim=1).values
    return vocab_size - 1 - best % _WORD
