"""Suffix decoding with compiled trees, and a slow reference that counts occurrences of strings."""

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from services.worker.backends.arrays import Int32Array
from services.worker.backends.native.compiled import (
    NotCompiled,
    default_cache_directory,
    load_compiled,
)
from services.worker.backends.native.suffix_decoding import MAX_RESPONSE_BYTES, NativeSuffixDecoding
from services.worker.backends.suffix_decoding import SuffixRules

Tokens = list[int]
RULES = SuffixRules(
    max_tree_depth=24, max_cached_requests=100, max_spec_factor=1.0, min_token_prob=0.1
)


NUM_FORGOTTEN = 4
"""When trees are full, this number of old tokens is dropped for each token that is added."""


def suffix_trees(
    rules: SuffixRules = RULES, max_bytes: int = MAX_RESPONSE_BYTES
) -> NativeSuffixDecoding:
    """Compiled suffix decoding. Skips the test if the code cannot be compiled."""
    return NativeSuffixDecoding(_library(), rules, max_bytes)


@cache
def _library() -> ctypes.CDLL:
    try:
        return load_compiled(default_cache_directory(), lambda: None)
    except NotCompiled as reason:
        pytest.skip(f"no compiled code: {reason}")


@dataclass
class Response:
    """The tokens that follow those with which a request entered the batch."""

    key: bytes
    tokens: Tokens = field(default_factory=list)


@dataclass
class Row:
    """A request in the batch. `response` is None before its first token. `num_taken_in` counts the
    tokens before the response and those added to it.
    """

    key: bytes
    num_taken_in: int
    response: Response | None = None


class CountedSuffixes:
    """The reference: a SuffixDecoding without trees, whose memory is unlimited."""

    def __init__(self, rules: SuffixRules) -> None:
        self._rules = rules
        self._rows: dict[int, Row] = {}
        self.ended: list[Response] = []
        """Responses of requests that have left the batch, the oldest first."""

    def enter(self, row: int, key: bytes, num_tokens: int) -> None:
        self._rows[row] = Row(key, num_tokens)

    def take_in(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        for row in rows.tolist():
            for token in token_ids[row, self._rows[row].num_taken_in : num_tokens[row]].tolist():
                self._append(self._rows[row], token)

    def _append(self, own: Row, token: int) -> None:
        if not self._rules.max_cached_requests:
            return
        own.num_taken_in += 1
        own.response = own.response or Response(own.key)
        own.response.tokens.append(token)
        for _ in range(NUM_FORGOTTEN):
            if len(self.ended) > self._rules.max_cached_requests:
                del self.ended[0].tokens[0]
                if not self.ended[0].tokens:
                    del self.ended[0]

    def propose(self, row: int, token_ids: Int32Array, num_tokens: Int32Array, most: int) -> Tokens:
        tokens, key = token_ids[row, : num_tokens[row]].tolist(), self._rows[row].key
        written = [row.response for row in self._rows.values() if row.response is not None]
        others = [response.tokens for response in [*self.ended, *written] if response.key == key]
        own_score, own = self._guess([tokens], tokens, most)
        score, found = self._guess(others, tokens, most)
        return found if score > own_score else own

    def leave(self, row: int) -> None:
        own = self._rows.pop(row, None)
        if own is not None and own.response is not None:
            self.ended.append(own.response)

    def clear(self) -> None:
        self._rows.clear()
        self.ended.clear()

    def _guess(self, sequences: Sequence[Tokens], known: Tokens, most: int) -> tuple[float, Tokens]:
        """The best draft after the tokens `known`, as a pair of its score and its tokens."""
        best: tuple[float, Tokens] = 0, []
        for length in range(1, min(len(known), self._rules.max_tree_depth - 1) + 1):
            match = known[-length:]
            if not _count(sequences, match):
                break
            allowed = min(most, int(length * self._rules.max_spec_factor + 1e-6))
            draft = self._follow(sequences, match, allowed)
            if draft[0] >= best[0]:
                best = draft
        return best

    def _follow(
        self, sequences: Sequence[Tokens], match: Tokens, most: int
    ) -> tuple[float, Tokens]:
        score, probability, drafts = 0.0, 1.0, Tokens()
        while len(drafts) < most and len(match) + len(drafts) < self._rules.max_tree_depth:
            string = match + drafts
            following = Counter(
                tokens[end]
                for tokens in sequences
                for end in range(len(string), len(tokens))
                if tokens[end - len(string) : end] == string
            )
            if not following:
                break
            token = min(following, key=lambda one: (-following[one], one))
            probability *= following[token] / _count(sequences, string)
            if probability < self._rules.min_token_prob:
                break
            drafts.append(token)
            score += probability
        return score, drafts


def _count(sequences: Sequence[Tokens], string: Tokens) -> int:
    size = len(string)
    return sum(
        tokens[start : start + size] == string
        for tokens in sequences
        for start in range(len(tokens) - size + 1)
    )
