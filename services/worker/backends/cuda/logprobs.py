"""Log-probabilities where the logits are, brought to the host in one piece behind the tokens.

They are the host's: best first, among equals the lowest id first, ranks in that order. Sums are
taken in another order, so that the last bits may differ.
"""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.device import Device, Download
from services.worker.sampling.logprobs import LogprobRows

_WORD = 2**32


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of sampled tokens on their way to the host.

    `num_top`: of the rows that want them, how many of the most probable tokens. `numbers` float64
    [rows, 2 * width + 1]: `width` token ids, the sampled one first, as many log-probabilities, and
    the sampled token's rank.
    """

    num_top: dict[int, int]
    numbers: Download

    def wait(self) -> dict[int, LogprobRows]:
        """Those of each row, once they are there."""
        numbers = self.numbers.wait()
        width = numbers.shape[1] // 2
        return {
            row: LogprobRows(
                1 + num_top,
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
    """Of the rows `num_top` of the logits float32 [R, V] and of the tokens sampled from them, int64
    [R]. At least one row; those without a usable distribution get numbers that mean nothing.

    `by_row`: one after the other, so that the order of sums does not depend on how many there are.
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
    """See PendingLogprobs."""
    sampled = token_ids.clamp(min=0).unsqueeze(1)
    ids = torch.cat((sampled, _best(logits, num_top)), dim=1)
    largest = logits.amax(dim=1, keepdim=True)
    sums = torch.exp(logits - largest).sum(dim=1, keepdim=True, dtype=torch.float64)
    normalizers = (largest + sums.log()).float()
    logprobs = logits.gather(1, ids) - normalizers
    value, places = logits.gather(1, sampled), torch.arange(logits.shape[1], device=logits.device)
    better = (logits > value) | ((logits == value) & (places < sampled))
    ranks = 1 + better.sum(dim=1, keepdim=True)
    return torch.cat((ids, logprobs.double(), ranks), 1)


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best tokens of each row, best first, int64 [R, count].

    Of equals a selection may give any, so it is made among numbers that are all different: the
    logit's bits, in an order that is the logit's, above the token's place from the end.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # of two zeros one
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    places = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    best = (ordered * _WORD + places).topk(min(count, vocab_size), dim=1).values
    return vocab_size - 1 - best % _WORD
