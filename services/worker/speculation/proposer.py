"""What a proposer of drafts does."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Proposer(Protocol):
    """Proposes drafts: tokens that are likely to follow those of a request. What it proposes
    changes how many steps an output takes, and never the output.

    Requests are named by their row of the batch. Every rank of a model must propose the same.
    """

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        """Up to `most` drafts, one or more, of what follows these tokens, which are all that are
        known of the request. Calls for a row bring the same tokens as before, and further ones.
        """

    def forget(self, row: int) -> None:
        """The request in a row, if it was named, has left."""

    def clear(self) -> None:
        """All requests have left."""
