"""How many drafts a request gets, from the acceptance of its previous drafts.

Rejected drafts cost rows of a step. If all drafts are accepted, the number is doubled. If none is
accepted twice in a row, it is halved. At 1, the request gets no drafts for a number of steps
instead. This number doubles each time, since text that did not repeat itself may continue so.
"""

_MOST_EMPTY = 2
"""Consecutive verifications without an accepted draft after which the number is reduced."""
_FIRST_REST, _LONGEST_REST = 8, 64
"""Steps without drafts, after single drafts were rejected: first and longest pause."""


class DraftLength:
    """The number of drafts of one request: from 1 to `most`, or 0 during a pause."""

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._num_empty = 0
        self._rest, self._next_rest = 0, _FIRST_REST

    def next(self) -> int:
        """The number of drafts for the next step."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._length

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Records that `num_accepted` of `num_drafts` drafts were accepted; `num_drafts` is above
        0.
        """
        if num_accepted:
            self._num_empty, self._next_rest = 0, _FIRST_REST
            if num_accepted == num_drafts:
                self._length = min(self._most, 2 * self._length)
            return
        self._num_empty += 1
        if self._num_empty < _MOST_EMPTY:
            return
        self._num_empty = 0
        if self._length > 1:
            self._length //= 2
        else:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._rest, _LONGEST_REST)
