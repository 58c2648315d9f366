"""Escapes control characters in the strings of a model's JSON."""

import re

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}


class ControlEscaper:
    """Escapes raw control characters in the strings of a JSON text that is fed in pieces. Models
    often write such characters, but JSON does not allow them in strings.
    """

    def __init__(self) -> None:
        self._in_string = False
        self._after_backslash = False

    def feed(self, text: str) -> str:
        pieces: list[str] = []
        at = 0
        while at < len(text):
            if self._after_backslash:
                self._after_backslash = False
                pieces.append(_escape(text[at]))
                at += 1
                continue
            end = self._next_mark(text, at)
            pieces.append(text[at:end])
            if end < len(text):
                pieces.append(self._mark(text[end]))
            at = end + 1
        return "".join(pieces)

    def _next_mark(self, text: str, at: int) -> int:
        """Returns the position of the next quote, backslash or control character that must be
        processed, or the end of the text.
        """
        if self._in_string:
            found = _IN_STRING.search(text, at)
            return len(text) if found is None else found.start()
        quote = text.find('"', at)
        return len(text) if quote < 0 else quote

    def _mark(self, character: str) -> str:
        if character == '"':
            self._in_string = not self._in_string
            return character
        if character == "\\":
            self._after_backslash = True
            return character
        return "\\" + _escape(character)


def _escape(character: str) -> str:
    """Returns what must follow a backslash to escape this character."""
    if character >= " ":
        return character
    return _SHORT.get(character) or f"u{ord(character):04x}"
