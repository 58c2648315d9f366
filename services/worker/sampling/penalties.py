"""Penalties for tokens that a request already holds."""

from __future__ import annotations

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.sampling.arrays import Float32Array, Int32Array


class Penalties:
    """Repetition over prompt and output, then frequency and presence over the output.

    Repetition divides positive logits and multiplies others (Keskar et al. 2019, "CTRL").
    Keeps only the distinct tokens of the request, so that a row costs their number, not the
    vocabulary.
    """

    def __init__(
        self, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        seen = np.unique(token_ids)
        self._index_of = {token_id: index for index, token_id in enumerate(seen.tolist())}
        self._token_ids = seen.astype(np.int64)
        self._output_counts = np.zeros(len(seen), dtype=np.float32)
        output = token_ids[num_prompt_tokens:]
        np.add.at(self._output_counts, np.searchsorted(seen, output), 1)

    def apply(self, logits: Float32Array) -> None:
        size = len(self._index_of)
        token_ids, counts = self._token_ids[:size], self._output_counts[:size]
        values = logits[token_ids]
        if self._repetition != 1:
            divided, multiplied = values / self._repetition, values * self._repetition
            values = np.where(values > 0, divided, multiplied)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[token_ids] = values

    def append(self, token_id: int) -> None:
        index = self._index_of.get(token_id)
        if index is None:
            index = self._new_index(token_id)
        self._output_counts[index] += 1

    def _new_index(self, token_id: int) -> int:
        index = len(self._index_of)
        if index == len(self._token_ids):
            self._token_ids = _doubled(self._token_ids)
            self._output_counts = _doubled(self._output_counts)
        self._index_of[token_id] = index
        self._token_ids[index] = token_id
        return index


def _doubled(array: np.ndarray) -> np.ndarray:
    """A copy with room for as many again, and a few; the room is zero."""
    return np.concatenate((array, np.zeros(len(array) + 16, dtype=array.dtype)))
