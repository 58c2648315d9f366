"""Log-probabilities of given tokens and of the most probable tokens, computed from logits."""

from dataclasses import dataclass

import numpy as np

from services.worker.backends.arrays import Float32Array, Int32Array
from services.worker.sampling.filters import best_token_ids


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of consecutive positions, in the layout of `stepwell.common.v1.Logprobs`.

    Column 0 is the position's actual token. The other columns are the most probable tokens, best
    first, the lowest id first among equals. They may include the actual token. `ranks` has each
    actual token's rank in this order, counted from 1 over the whole vocabulary. If the logits
    contain NaN, the log-probabilities are NaN.
    """

    token_ids: Int32Array  # [n, width]
    logprobs: Float32Array  # [n, width], natural logarithm
    ranks: Int32Array  # [n]

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.token_ids.shape[1])

    @classmethod
    def joined(cls, parts: "list[LogprobRows]") -> "LogprobRows":
        """Joins the positions of at least one part, in order."""
        columns = zip(*((part.token_ids, part.logprobs, part.ranks) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns)) if len(parts) > 1 else parts[0]


def logprob_rows(logits: Float32Array, token_ids: np.ndarray, num_top: int) -> LogprobRows:
    """Computes the log-probability of token i from row i of the logits [n, V]. Each row's result is
    independent of other rows, so a prompt may be computed in chunks.
    """
    num_rows = len(token_ids)
    ids = np.empty((num_rows, 1 + num_top), dtype=np.int32)
    logprobs = np.empty((num_rows, 1 + num_top), dtype=np.float32)
    ranks = np.empty(num_rows, dtype=np.int32)
    for row in range(num_rows):
        own = logits[row]
        token_id = int(token_ids[row])
        ids[row, 0] = token_id
        best = best_token_ids(own, num_top)
        ids[row, 1:] = best[np.argsort(-own[best], kind="stable")]
        logprobs[row] = own[ids[row]] - _log_normalizer(own)
        value = own[token_id]
        tied_before = np.count_nonzero(own[:token_id] == value)
        ranks[row] = 1 + np.count_nonzero(own > value) + tied_before
    return LogprobRows(ids, logprobs, ranks)


def _log_normalizer(logits: Float32Array) -> float:
    largest = logits.max()
    with np.errstate(invalid="ignore"):
        total = np.exp(logits - largest).sum(dtype=np.float64)
    return float(largest + np.log(total))
