"""Drafts by suffix trees, which there is compiled code for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """How drafts are found in suffix trees."""

    max_tree_depth: int
    """Most tokens of a match and its drafts together."""
    max_cached_requests: int
    """Most responses in the trees of responses; 0: there are no such trees."""
    max_spec_factor: float
    """Most drafts, as a multiple of the tokens that match."""
    min_token_prob: float
    """What the product of the shares of the proposed tokens is at least."""


class SuffixDecoding(Protocol):
    """Suffix trees: one of the tokens of each request, and for each key one of responses. Requests
    are named by their row of the batch. Same calls give the same drafts, on every machine.

    A tree holds, for each string of up to `max_tree_depth` tokens, how often it occurs: the share
    of a token behind a string is how often both together do, over how often the string does. Of
    each end of a request's tokens that a tree holds, of m tokens, up to m * `max_spec_factor`
    drafts are made: always the token that followed most often, the lowest one of equals, as long as
    the product of their shares is at least `min_token_prob`. The drafts with the largest sum of
    these products count, of equals those of the longest match; and of the two trees the better
    ones, the request's own of equals.

    Known tokens of a row are the first `num_tokens[row]` of `token_ids[row]`; `token_ids` is
    [all rows, n]. A batch passes the same two arrays in each call.
    """

    def enter(self, row: int, key: bytes, num_tokens: int) -> None:
        """A request with `num_tokens` known ones enters a free row. Tokens after these are its
        response, which requests of the same key have drafts from, also after it has left.
        """

    def take_in(self, rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        """Adds new tokens to the responses of these rows. Where there are too many responses, or
        too large ones, tokens of the one that ended first are forgotten, a few for each new one.
        """

    def propose(
        self, row: int, token_ids: Int32Array, num_tokens: Int32Array, most: int
    ) -> Sequence[int]:
        """Up to `most` drafts of what follows the known tokens of a row. Since the call before it
        has the same ones, and further ones.
        """

    def leave(self, row: int) -> None:
        """The request in a row, if there is one, has left."""

    def clear(self) -> None:
        """Forgets all requests and responses."""
