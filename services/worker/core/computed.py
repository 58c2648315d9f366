"""The requests of a step as the model computes them, and the logits that it returns."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.attention import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of a step, in the layout's order.

    `order`: index of each in the step. `rows`: its row of the batch. `ends`: its number of tokens
    after the step, drafts included. `num_draft_tokens`: None if the step has no drafts.
    """

    order: Int64Array
    rows: Int32Array
    first_tokens: Int32Array
    ends: Int32Array
    num_scheduled_tokens: Int32Array
    num_draft_tokens: Int32Array | None

    def sampling(self, num_tokens: Int32Array) -> "SamplingRequests":
        """The requests to sample for: those whose last known token is computed.

        `num_tokens`: known tokens of each request.
        """
        drafts = self.num_draft_tokens
        known = self.ends if drafts is None else self.ends - drafts
        requests = np.flatnonzero(known == num_tokens)
        behind = (self.first_tokens + self.num_scheduled_tokens)[requests].astype(np.int64)
        if drafts is None:
            return SamplingRequests(requests, behind - 1, np.arange(len(requests)))
        counts = drafts[requests] + 1
        firsts = np.cumsum(counts) - counts
        tokens = np.repeat(behind - counts - firsts, counts) + np.arange(counts.sum())
        return SamplingRequests(requests, tokens, firsts)


@dataclass(frozen=True, slots=True)
class SamplingRequests:
    """The requests of a step that tokens are sampled for.

    `tokens`: rising indexes of the step's tokens whose logits are needed: each request's last known
    token and its drafts. `firsts`: index in `tokens` of each request's first.
    """

    requests: Int64Array
    tokens: Int64Array
    firsts: Int64Array


@dataclass(frozen=True, slots=True)
class Computed:
    """The model's results for a step.

    `logits`: of the sampling tokens, float32 [n, vocab_size]; None if there are none. `logits_of`:
    computes the logits of other tokens, given by their indexes, int64 [n].
    """

    logits: torch.Tensor | None
    logits_of: Callable[[torch.Tensor], torch.Tensor]
