"""Chooses how many drafts a request gets, based on how many of its previous drafts were accepted.

Rejected drafts cost rows of a step. If all drafts are accepted, the number is doubled. If twice in
a row no draft is accepted, the number is halved. If the number is already 1, drafting pauses for
some steps instead. Each pause is twice as long as the one before, since text that has not repeated
itself is likely to continue without repetition.
"""

_MOST_EMPTY = 2
"""Consecutive verifications without an accepted draft after which the number is reduced."""
_FIRST_REST, _LONGEST_REST = 8, 64
"""The lengths of the first and of the longest pause, in steps."""


class DraftLength:
    """The number of drafts of one request. It is between 1 and `most`, or 0 during a pause."""

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._num_empty = 0
        self._rest, self._next_rest = 0, _FIRST_REST

    def next(self) -> int:
        if self._rest:
            self._rest -= 1
            return 0
        return self._length

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Records that `num_accepted` of `num_drafts` drafts, at least one, were accepted."""
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
