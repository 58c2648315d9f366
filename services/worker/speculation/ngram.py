"""Drafts from the request's own tokens (prompt lookup decoding). If the request's last tokens
occurred earlier, the drafts are the tokens that followed the earlier occurrence.

It follows the rules of vLLM's method "ngram". As many last tokens are matched as possible within
the limits (n tokens). The two occurrences may overlap. If there are several earlier occurrences,
the first is used. vLLM searches all tokens in each step. Here an index stores where n-grams first
ended, so that a look-up takes a microsecond for any length. Appending a token adds one entry to the
index. If the token ends an n-gram that occurred before, it adds up to one entry for each n.
"""

from collections.abc import Sequence

from services.worker.backends.arrays import Int32Array
from services.worker.speculation.config import SpeculativeConfig


class NgramIndex:
    """The n-grams of one sequence of tokens, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._token_ids: list[int] = []
        self._first_end: dict[tuple[int, ...], int] = {}
        """Maps n-grams to the number of tokens up to the end of their first occurrence, negated if
        the n-gram occurs only once. An n-gram is stored only if the n-gram of its last n - 1 tokens
        occurs again.
        """
        self._match_end = 0
        """The end of the first occurrence of the longest repeated suffix, or 0 if there is none."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
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
        """Up to `most` tokens that followed the first occurrence of the longest suffix that
        occurred before. Empty if no suffix occurred before.
        """
        end = self._match_end
        return self._token_ids[end : end + most] if end else ()


class NgramProposer:
    """A Proposer with an index for each request, built at the first proposal for the request. An
    index needs about 100 bytes for each token of varied text, and for repetitive text about 100
    bytes for each token and each n.
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
