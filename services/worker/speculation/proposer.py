"""The interface of a proposer of drafts."""

from collections.abc import Sequence
from typing import Protocol

from services.worker.backends.arrays import Int32Array


class Proposer(Protocol):
    """Proposes drafts: tokens that are likely to follow a request's tokens. Drafts change how many
    steps an output takes, but not its tokens.

    Requests are identified by their row in the batch. All ranks of a model must propose the same
    drafts.
    """

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        """Returns up to `most` drafts, where `most` is at least 1. `token_ids`: all known tokens of
        the request. A later call for the row passes these tokens again, followed by new ones.
        """

    def forget(self, row: int) -> None:
        """Called when the request in this row has left the batch, even if it never had drafts."""

    def clear(self) -> None:
        """Called when all requests have left the batch."""
