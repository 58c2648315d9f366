"""Drafts from the request's own tokens: what followed when its last tokens occurred before.

Prompt lookup decoding, as vLLM's method "ngram" decides it: of the lengths n from the longest to
the shortest, the first counts of which the last n tokens occurred earlier, overlaps allowed; of
several occurrences the earliest. Where vLLM searches all tokens in each step, here an index holds
where n-grams ended first, so that a look-up takes a microsecond however long the request is. A
token takes one more where no n-gram ends that occurred before, and else one for each length.
"""

from collections.abc import Sequence

from services.worker.speculation.config import SpeculativeConfig
from services.worker.speculation.proposer import Int32Array


class NgramIndex:
    """The n-grams of one sequence of tokens, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._token_ids: list[int] = []
        self._first_end: dict[tuple[int, ...], int] = {}
        """By n-gram: how many tokens there are up to its end, where it occurs first; negative if it
        occurs nowhere else. Longer ones are held as far as they end in one that occurs again.
        """
        self._match_end = 0
        """Where the longest end of the sequence that occurred before did first; 0: none did."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        known, first_end = self._token_ids, self._first_end
        for end, token_id in enumerate(token_ids, len(known) + 1):
            known.append(token_id)
            self._match_end = 0
            for length in self._lengths:
                if length > end:
                    break
                ngram = tuple(known[-length:])
                first = first_end.setdefault(ngram, -end)
                if first == -end:
                    break
                if first < 0:
                    first_end[ngram] = first = -first
                    if length < self._lengths[-1] and length < first:
                        first_end[tuple(known[first - length - 1 : first])] = -first
                self._match_end = first

    def follow(self, most: int) -> Sequence[int]:
        """Up to `most` tokens that followed the longest end of the sequence that occurred before;
        none if there is no such end.
        """
        end = self._match_end
        return self._token_ids[end : end + most] if end else ()


class NgramProposer:
    """A Proposer with an index for each request. An index takes about 100 bytes for each token, and
    for text that repeats itself as much for each length; it is built with the first proposal of a
    request.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        index = self._indexes.get(row)
        if index is None:
            index = self._indexes[row] = NgramIndex(self._shortest, self._longest)
        index.extend(token_ids[len(index) :].tolist())
        return index.follow(most)

    def forget(self, row: int) -> None:
        self._indexes.pop(row, None)

    def clear(self) -> None:
        self._indexes.clear()
