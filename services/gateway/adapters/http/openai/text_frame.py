"""Events that differ in their text alone: what is the same in all of them is encoded once."""

from collections.abc import Mapping
from typing import Any, cast

from services.gateway.adapters.http.exchange.json_pieces import to_json
from services.gateway.core.request.choice import Piece

_TEXT, _TOKEN_ID = "\0", "\1"
"""Stand for the text and for the ids of the tokens, which may be left out, in this order."""


class TextFrame:
    """What surrounds the text and the token ids of a piece in its event."""

    __slots__ = ("_after", "_before", "_between", "_has_ids")

    def __init__(self, head: str, chunk: Mapping[str, Any], tail: str) -> None:
        """`chunk` is that of the marked piece; `head` and `tail` surround it."""
        before, rest = to_json(chunk).split(to_json(_TEXT))
        self._between, self._has_ids, after = rest.partition(to_json(_TOKEN_ID))
        self._before, self._after = head + before, after + tail

    @staticmethod
    def marked(index: int) -> Piece:
        """A piece of an answer, with marks in place of what differs."""
        return Piece(index, _TEXT, cast(list[int], [_TOKEN_ID]))

    def event(self, piece: Piece) -> bytes:
        """The event of a piece."""
        ids = ",".join(map(str, piece.token_ids)) if self._has_ids else ""
        return f"{self._before}{to_json(piece.text)}{self._between}{ids}{self._after}".encode()
