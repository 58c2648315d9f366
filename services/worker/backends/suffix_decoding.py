"""The interface for drafts from suffix trees, which are compiled code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.backends.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class SuffixRules:
    max_tree_depth: int
    """Maximum number of tokens in a match and its drafts together."""
    max_cached_requests: int
    """Maximum number of responses in the trees of responses. 0 means no such trees."""
    max_spec_factor: float
    """Maximum number of drafts, as a multiple of the number of matching tokens."""
    min_token_prob: float
    """Drafts end when the product of their frequencies is below this number."""


class SuffixDecoding(Protocol):
    """Keeps suffix trees: one tree of the tokens of each request, and one tree of responses for
    each key. Requests are identified by their row in the batch. Equal calls return equal drafts on
    every machine.

    A tree stores how often each string of up to `max_tree_depth` tokens occurs. The frequency of a
    token after a string is the count of both together, divided by the count of the string. A match
    is a suffix of a request's tokens that is in a tree. A match of m tokens yields up to m *
    `max_spec_factor` drafts. Each draft is the most frequent next token, or the lowest id among
    equally frequent tokens. Drafts end when the product of their frequencies is below
    `min_token_prob`. In each tree the match with the largest sum of these products is used, or the
    longest of equal ones. Of the two trees, the one with the larger sum is used, or the request's
    own tree if the sums are equal.

    The known tokens of a row are the first `num_tokens[row]` of `token_ids[row]`. `token_ids` is
    [all rows, n]. A batch passes the same two arrays in each call.
    """

    def enter(self, row: int, key: bytes, num_tokens: int) -> None:
        """Adds a request with `num_tokens` known tokens in a free row. Later tokens are the
        request's response. Other requests with the same key get drafts from this response, even
        after the request has left the batch.
        """

    def take_in(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        """Appends new tokens to the responses of these rows. If there are too many responses, or if
        they need too much memory, the response that ended first is removed gradually: a few of its
        tokens for each new token.
        """

    def propose(
        self, row: int, token_ids: Int32Array, num_tokens: Int32Array, most: int
    ) -> Sequence[int]:
        """Returns up to `most` drafts. Tokens known in earlier calls must be unchanged."""

    def leave(self, row: int) -> None:
        """Removes the request in a row, if there is one."""

    def clear(self) -> None:
        """Removes all requests and responses."""
