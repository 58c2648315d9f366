"""Changes of a request's logits before the filters, in vLLM's order.

An edit belongs to one request. It changes one row of logits [V] in place, and is updated with each
token that the request samples.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.sampling.arrays import Float32Array, Int32Array
from services.worker.sampling.penalties import Penalties


class LogitEdit(Protocol):
    """One change of the logits of one request."""

    def apply(self, logits: Float32Array) -> None:
        """Changes the row [V] in place; minus infinity bans a token."""

    def append(self, token_id: int) -> None:
        """Updates the edit with the request's next token."""


def logit_edits(
    params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
) -> tuple[LogitEdit, ...]:
    """The edits that the parameters ask for, in the order in which they apply.

    `token_ids` is the prompt and the output so far.
    """
    output = token_ids[num_prompt_tokens:]
    edits: list[LogitEdit] = []
    if params.allowed_token_ids:
        edits.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        edits.append(BadWords(params.bad_words, output))
    ending = params.stop_token_ids + params.eos_token_ids
    if params.min_tokens > len(output) and ending:
        edits.append(MinTokens(ending, params.min_tokens - len(output)))
    if params.logit_bias_token_ids:
        edits.append(LogitBias(params.logit_bias_token_ids, params.logit_bias_values))
    if params.penalises:
        edits.append(Penalties(params, token_ids, num_prompt_tokens))
    return tuple(edits)


class AllowedTokens:
    """Bans every token but those named."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int64)

    def apply(self, logits: Float32Array) -> None:
        allowed = logits[self._token_ids]
        logits.fill(-np.inf)
        logits[self._token_ids] = allowed

    def append(self, token_id: int) -> None:
        """Nothing depends on what was sampled."""


class BadWords:
    """Bans the last token of a sequence when the output ends with all before it.

    Only the output counts, as in vLLM: a sequence that begins in the prompt may be completed.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], output: Int32Array) -> None:
        self._words = tuple((word[:-1], word[-1]) for word in words)
        self._recent = deque(output.tolist(), maxlen=max(map(len, words)) - 1)

    def apply(self, logits: Float32Array) -> None:
        recent = tuple(self._recent)
        for prefix, last in self._words:
            if not prefix or recent[-len(prefix) :] == prefix:
                logits[last] = -np.inf

    def append(self, token_id: int) -> None:
        self._recent.append(token_id)


class MinTokens:
    """Bans the tokens that would end the request while it lacks `missing` tokens."""

    def __init__(self, ending: tuple[int, ...], missing: int) -> None:
        self._ending = np.array(ending, dtype=np.int64)
        self._missing = missing

    def apply(self, logits: Float32Array) -> None:
        if self._missing > 0:
            logits[self._ending] = -np.inf

    def append(self, token_id: int) -> None:  # noqa: ARG002
        self._missing -= 1


class LogitBias:
    """Shifts the logits of some tokens."""

    def __init__(self, token_ids: tuple[int, ...], values: tuple[float, ...]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int64)
        self._values = np.array(values, dtype=np.float32)

    def apply(self, logits: Float32Array) -> None:
        logits[self._token_ids] += self._values

    def append(self, token_id: int) -> None:
        """Nothing depends on what was sampled."""
