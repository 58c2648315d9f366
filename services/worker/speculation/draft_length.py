"""How many drafts a request gets, by what became of those before.

Drafts that are rejected cost rows of a step. A request whose drafts all stand gets twice as many;
one of whose drafts none stood, twice in a row, half as many, and in the end none for a while: each
time twice as long, since text that did not repeat itself may go on so.
"""

_MOST_EMPTY = 2
"""Verifications in a row of which no draft stands, before there are fewer."""
_FIRST_REST, _LONGEST_REST = 8, 64
"""Steps without drafts, once a single one does not stand either."""


class DraftLength:
    """The length of one request's drafts, from 1 to `most`, or 0 while it rests."""

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._num_empty = 0
        self._rest, self._next_rest = 0, _FIRST_REST

    def next(self) -> int:
        """Drafts for the next step."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._length

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Of one or more drafts, `num_accepted` were accepted."""
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
