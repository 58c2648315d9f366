"""What the model is to make of a step's tokens, and whose they are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.attention import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of a step, in the layout's order.

    `order`: which of the step's requests each is. `ends`: tokens that each has once the step is
    done, drafts included. `num_draft_tokens` None: there are none.
    """

    order: Int64Array
    rows: Int32Array
    first_tokens: Int32Array
    ends: Int32Array
    num_scheduled_tokens: Int32Array
    num_draft_tokens: Int32Array | None

    def sampling(self, num_tokens: Int32Array) -> "SamplingRequests":
        """Who is sampled: whose last known token is computed; `num_tokens` are known of each."""
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
    """Which of a step's requests are sampled.

    `tokens`, rising, are those whose logits that takes: of each request its last known one and its
    drafts, from `firsts` on.
    """

    requests: Int64Array
    tokens: Int64Array
    firsts: Int64Array


@dataclass(frozen=True, slots=True)
class Computed:
    """What the model made of a step: `logits`, float32 [num sampling tokens, vocab_size], or None
    where there are none, and `logits_of` what other tokens are asked for, int64 [n].
    """

    logits: torch.Tensor | None
    logits_of: Callable[[torch.Tensor], torch.Tensor]
