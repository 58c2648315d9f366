"""Log-probabilities of chosen tokens and of the most probable ones, from unmodified logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.sampling.arrays import Float32Array, Int32Array
from services.worker.sampling.filters import best_token_ids


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of consecutive positions, as `stepwell.common.v1.Logprobs` lays them out.

    Column 0 is the position's actual token, columns 1.. the most probable tokens, best first
    (among equals the lowest id first; the actual token may be among them). `ranks` counts from 1 in
    that order. Where the logits held NaN, the log-probabilities are NaN.
    """

    width: int
    token_ids: Int32Array  # [n, width]
    logprobs: Float32Array  # [n, width], natural logarithm
    ranks: Int32Array  # [n]


def prompt_logprobs(
    logits: torch.Tensor, target_token_ids: np.ndarray, num_top: int
) -> LogprobRows:
    """Log-probabilities of prompt tokens: row i of the logits float32 [n, V] predicts target i.

    A row's result depends on that row alone, so a prompt cut into chunks gives the same rows.
    """
    return logprob_rows(logits.numpy(force=True), target_token_ids, num_top)


def logprob_rows(logits: Float32Array, token_ids: np.ndarray, num_top: int) -> LogprobRows:
    """`prompt_logprobs` over an array that is already on the host."""
    num_rows = len(token_ids)
    ids = np.empty((num_rows, 1 + num_top), dtype=np.int32)
    logprobs = np.empty((num_rows, 1 + num_top), dtype=np.float32)
    ranks = np.empty(num_rows, dtype=np.int32)
    for row in range(num_rows):
        line = logits[row]
        token_id = int(token_ids[row])
        ids[row, 0] = token_id
        best = best_token_ids(line, num_top)
        ids[row, 1:] = best[np.argsort(-line[best], kind="stable")]
        logprobs[row] = line[ids[row]] - _log_normalizer(line)
        ranks[row] = _rank(line, token_id)
    return LogprobRows(1 + num_top, ids, logprobs, ranks)


def _log_normalizer(line: Float32Array) -> float:
    largest = line.max()
    with np.errstate(invalid="ignore"):
        total = np.exp(line - largest).sum(dtype=np.float64)
    return float(largest + np.log(total))


def _rank(line: Float32Array, token_id: int) -> int:
    value = line[token_id]
    better = np.count_nonzero(line > value)
    tied_before = np.count_nonzero(line[:token_id] == value)
    return int(1 + better + tied_before)
