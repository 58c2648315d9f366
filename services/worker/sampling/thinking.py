"""Ends reasoning that reaches its token limit (`thinking_budget`)."""

from collections import deque

import numpy as np

from services.common.request.thinking_budget import ThinkingBudget
from services.worker.sampling.arrays import Float32Array, Int32Array


class ThinkingLimit:
    """Once the reasoning has `num_tokens` tokens, allows only the next token of its end mark, the
    token sequence that ends reasoning.

    The state depends only on the output's tokens, so that a request that is sent again with its
    output continues in the same way. A partial end mark is completed.
    """

    def __init__(self, budget: ThinkingBudget, output: Int32Array) -> None:
        self._most = budget.num_tokens
        self._start = _Mark(budget.start_token_ids)
        self._end = _Mark(budget.end_token_ids)
        self._is_inside = budget.begins_inside
        self._num_tokens = 0
        for token_id in output.tolist():
            self.append(token_id)

    def apply(self, logits: Float32Array) -> None:
        if self._is_inside and self._num_tokens >= self._most:
            logits.fill(-np.inf)
            logits[self._end.next_token_id] = 0.0

    def append(self, token_id: int) -> None:
        mark = self._end if self._is_inside else self._start
        self._num_tokens += self._is_inside
        if mark.completed_by(token_id):
            self._num_tokens -= len(mark) if self._is_inside else 0
            self._is_inside = not self._is_inside


class _Mark:
    """A sequence of tokens to find in a stream."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._recent: deque[int] = deque(maxlen=max(1, len(token_ids)))
        self._num_matched = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def next_token_id(self) -> int:
        """The next token of the mark after the part that the stream ends with."""
        return self._token_ids[self._num_matched]

    def completed_by(self, token_id: int) -> bool:
        """Appends a token. Returns whether it completes the mark."""
        self._recent.append(token_id)
        recent = tuple(self._recent)
        lengths = range(len(recent), 0, -1)
        self._num_matched = next((n for n in lengths if recent[-n:] == self._token_ids[:n]), 0)
        if not self._num_matched or self._num_matched < len(self._token_ids):
            return False
        self._recent.clear()
        self._num_matched = 0
        return True
