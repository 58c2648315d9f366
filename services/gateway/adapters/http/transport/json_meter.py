"""Counts the values of a JSON text while its bytes arrive. Texts with too many values are refused,
because parsing them would block the event loop.
"""

from services.common.errors import InvalidArgument

MAX_KEYS = 10_000
MAX_BRACKETS = 10_000
_MAX_KEY_LENGTH = 64


class JsonMeter:
    """Counts the commas, colons and brackets of a text. Characters inside strings are not counted.

    The meter does not check whether the text is JSON. The parser does that.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._num_values = self._num_keys = self._num_brackets = 0
        self._in_string = False
        self._backslash = b""
        self._key = ""

    def feed(self, piece: bytes) -> None:
        """Counts the next piece. Raises InvalidArgument once a limit is exceeded."""
        text = self._backslash + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._backslash = b"\\" if num_backslashes % 2 else b""
        if self._backslash:
            text = text[:-1]
        parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        if b":" in outside:
            self._key = _last_key(parts) or self._key
        self._in_string ^= len(parts) % 2 == 0
        self._num_values += outside.count(b",")
        self._num_keys += outside.count(b":")
        self._num_brackets += outside.count(b"[") + outside.count(b"{")
        for count, most, what in (
            (self._num_values, self._max_values, "values"),
            (self._num_keys, MAX_KEYS, "keys"),
            (self._num_brackets, MAX_BRACKETS, "lists and objects"),
        ):
            if count > most:
                where = f"{self._key}: " if self._key and what != "keys" else ""
                raise InvalidArgument(
                    f"{where}the body holds more than {most} {what}; one request may not",
                    field=self._key if where else None,
                    reason="TOO_MANY_ITEMS",
                )


def _last_key(parts: list[bytes]) -> str:
    """Returns the last object key in these parts of the text, for an error message. Returns an
    empty text if the key is incomplete or is not an identifier.
    """
    for place in range(len(parts) - 1, 0, -1):
        if parts[place].lstrip()[:1] == b":":
            key = parts[place - 1].decode("latin-1")
            return key if key.isidentifier() and len(key) <= _MAX_KEY_LENGTH else ""
    return ""
