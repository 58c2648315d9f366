"""Encodes events that differ only in text and token ids. Their common part is encoded once."""

from collections.abc import Mapping
from typing import Any, cast

from services.gateway.adapters.http.exchange.json_pieces import to_json
from services.gateway.core.request.choice import Piece

_TEXT, _TOKEN_ID = "\0", "\1"
"""Placeholders for the text and the token ids. In a chunk the text precedes the ids, which may be
absent.
"""


class TextFrame:
    """An encoded event without its text and token ids."""

    __slots__ = ("_after", "_before", "_between", "_has_ids")

    def __init__(self, head: str, chunk: Mapping[str, Any], tail: str) -> None:
        """`chunk` is the chunk of the piece that `marked` returns. `head` and `tail` are the texts
        before and after a chunk in its event.
        """
        before, rest = to_json(chunk).split(to_json(_TEXT))
        self._between, self._has_ids, after = rest.partition(to_json(_TOKEN_ID))
        self._before, self._after = head + before, after + tail

    @staticmethod
    def marked(index: int) -> Piece:
        """Returns a piece that has placeholders in place of its text and token ids."""
        return Piece(index, _TEXT, cast(list[int], [_TOKEN_ID]))

    def event(self, piece: Piece) -> bytes:
        """Encodes the event of a piece."""
        ids = ",".join(map(str, piece.token_ids)) if self._has_ids else ""
        return f"{self._before}{to_json(piece.text)}{self._between}{ids}{self._after}".encode()
