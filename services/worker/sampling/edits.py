"""Edits of a request's logits before the filters, in vLLM's order.

An edit belongs to one request. It changes the request's row of logits [V] in place, and is updated
with each token that the request samples.
"""

from collections import deque

import numpy as np

from services.common.request.sampling import SamplingParams
from services.common.request.thinking_budget import ThinkingBudget
from services.worker.backends.arrays import Float32Array, Int32Array
from services.worker.sampling.filters import keep_only
from services.worker.sampling.grammar import GrammarMask


class LogitEdit:
    """An edit of one request's logits. By default sampled tokens do not change it."""

    def apply(self, logits: Float32Array) -> None:
        """Changes the row [V] in place. Minus infinity bans a token."""
        raise NotImplementedError

    def append(self, token_id: int) -> None:
        """Updates the edit with the request's next token."""


def logit_edits(
    params: SamplingParams,
    token_ids: Int32Array,
    num_prompt_tokens: int,
    grammar: GrammarMask | None = None,
) -> tuple[LogitEdit, ...]:
    """Returns the edits for these parameters, in the order in which they are applied. They are
    applied after the grammar's mask.

    `token_ids`: the prompt and the output so far. `grammar`: the grammar of a request with
    `structured_outputs`, otherwise None.
    """
    output = token_ids[num_prompt_tokens:]
    edits: list[LogitEdit] = []
    if params.allowed_token_ids:
        edits.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        edits.append(BadWords(params.bad_words, output))
    ending = params.stop_token_ids + params.eos_token_ids
    if params.min_tokens > len(output) and ending:
        edits.append(MinTokens(ending, params.min_tokens - len(output), grammar))
    if params.logit_bias_token_ids:
        edits.append(LogitBias(params.logit_bias_token_ids, params.logit_bias_values))
    if params.penalises:
        edits.append(Penalties(params, token_ids, num_prompt_tokens))
    if params.thinking_budget is not None:
        edits.append(ThinkingLimit(params.thinking_budget, output))
    return tuple(edits)


class AllowedTokens(LogitEdit):
    """Bans every token that is not allowed."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int64)

    def apply(self, logits: Float32Array) -> None:
        keep_only(logits, self._token_ids)


class BadWords(LogitEdit):
    """Bans the last token of a bad word when the output ends with all other tokens of the word.
    Only output tokens are compared, as in vLLM, so a bad word that begins in the prompt is not
    prevented.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], output: Int32Array) -> None:
        self._always = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._after: dict[int, list[tuple[int, ...]]] = {}
        """Maps a token to the bad words of which it is the last but one token."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._recent = deque(output.tolist(), maxlen=max(map(len, words)) - 1)

    def apply(self, logits: Float32Array) -> None:
        logits[self._always] = -np.inf
        recent = tuple(self._recent)
        for word in self._after.get(recent[-1], ()) if recent else ():
            if recent[1 - len(word) :] == word[:-1]:
                logits[word[-1]] = -np.inf

    def append(self, token_id: int) -> None:
        self._recent.append(token_id)


class MinTokens(LogitEdit):
    """Bans the tokens `ending`, which end the request, until `missing` more tokens are sampled.
    Bans nothing if the grammar allows only an end token.
    """

    def __init__(
        self, ending: tuple[int, ...], missing: int, grammar: GrammarMask | None = None
    ) -> None:
        self._ending = np.array(ending, dtype=np.int64)
        self._missing = missing
        self._grammar = grammar

    def apply(self, logits: Float32Array) -> None:
        if self._missing > 0 and not (self._grammar is not None and self._grammar.is_complete):
            logits[self._ending] = -np.inf

    def append(self, token_id: int) -> None:  # noqa: ARG002
        self._missing -= 1


class LogitBias(LogitEdit):
    """Shifts the logits of some tokens."""

    def __init__(self, token_ids: tuple[int, ...], values: tuple[float, ...]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int64)
        self._values = np.array(values, dtype=np.float32)

    def apply(self, logits: Float32Array) -> None:
        logits[self._token_ids] += self._values


class Penalties(LogitEdit):
    """Applies the repetition penalty for tokens of prompt and output, then the frequency and
    presence penalties for tokens of the output.

    The repetition penalty divides positive logits and multiplies others (Keskar et al. 2019,
    "CTRL"). Only the distinct tokens of the request are stored, so the cost depends on their number
    and not on the size of the vocabulary.
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
            index = self._index_of[token_id] = len(self._index_of)
            if index == len(self._token_ids):
                self._token_ids = _doubled(self._token_ids)
                self._output_counts = _doubled(self._output_counts)
            self._token_ids[index] = token_id
        self._output_counts[index] += 1


def _doubled(array: np.ndarray) -> np.ndarray:
    return np.concatenate((array, np.zeros(len(array) + 16, dtype=array.dtype)))


class ThinkingLimit(LogitEdit):
    """Ends reasoning after `num_tokens` tokens (`thinking_budget`): from then on only the next
    token of the end mark, the token sequence that ends reasoning, is allowed.

    If the output already ends with a part of the end mark, only the rest follows. The edit depends
    only on the output's tokens, so a preempted request that is sent again with its output continues
    in the same way.
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
    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._recent: deque[int] = deque(maxlen=max(1, len(token_ids)))
        self._num_matched = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def next_token_id(self) -> int:
        """The next token of the mark, after the part of the mark with which the stream ends."""
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
