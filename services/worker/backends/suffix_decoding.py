"""The interface for drafts by suffix trees, which are compiled code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """Rules for drafts from suffix trees."""

    max_tree_depth: int
    """Maximum of tokens in a match and its drafts together."""
    max_cached_requests: int
    """Maximum of responses in the trees of responses; 0: there are no such trees."""
    max_spec_factor: float
    """Maximum of drafts, as a multiple of the matching tokens."""
    min_token_prob: float
    """Minimum of the product of the proposed tokens' frequencies."""


class SuffixDecoding(Protocol):
    """Suffix trees: one of each request's tokens, and for each key one of responses. Requests are
    identified by their row in the batch. Equal calls return equal drafts on every machine.

    A tree stores how often each string of up to `max_tree_depth` tokens occurs. The frequency of a
    token after a string is the count of both together, divided by the count of the string. A match
    is a suffix of a request's tokens that is in a tree. A match of m tokens yields up to m *
    `max_spec_factor` drafts. Each draft is the most frequent next token, the lowest id among
    equals. Drafts end when the product of their frequencies is below `min_token_prob`. The match
    with the largest sum of these products is used, the longest among equals. Of the two trees the
    one with the larger sum is used, the request's own among equals.

    The known tokens of a row are the first `num_tokens[row]` of `token_ids[row]`; `token_ids` is
    [all rows, n]. A batch passes the same two arrays in each call.
    """

    def enter(self, row: int, key: bytes, num_tokens: int) -> None:
        """Adds a request with `num_tokens` known tokens in a free row. Later tokens are its
        response. Requests with the same key get drafts from it, also after the request has left.
        """

    def take_in(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        """Appends new tokens to the responses of these rows. If there are too many responses, or
        they are too large, tokens of the response that ended first are removed, a few for each new
        token.
        """

    def propose(
        self, row: int, token_ids: Int32Array, num_tokens: Int32Array, most: int
    ) -> Sequence[int]:
        """Up to `most` drafts after the known tokens of a row. Known tokens of earlier calls must
        be unchanged; new ones may follow.
        """

    def leave(self, row: int) -> None:
        """Removes the request in a row, if there is one."""

    def clear(self) -> None:
        """Removes all requests and responses."""
