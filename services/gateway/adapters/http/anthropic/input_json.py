"""Writes the inputs of tool calls. In Anthropic's API each input must be a JSON object."""

import json
import math
import re

from services.gateway.core.text.parsing.json_string import decoded
from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.text.parsing.sink import encodable

_SCALAR = re.compile(r"[-+.0-9A-Za-z_]+")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 100
"""Limit on the nesting of objects and lists, because clients can parse only about 200 levels."""


class InputWriter:
    """Converts the arguments of a tool call to the text of a JSON object while the model generates
    them. The text is returned in pieces: keys, values, brackets.

    A string, number or name is written together with its key when it is complete. If it is still
    incomplete at the end of the answer, it is omitted. Superfluous and missing commas, unknown
    escapes and words without quotes are repaired. Any other error of the JSON ends the object. Text
    that is not an object becomes an empty object.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self._unsent: list[str] = []
        self._closers: list[str] = []
        self._has_begun = False
        self._work = self._read()
        next(self._work)

    def feed(self, text: str) -> list[str]:
        self._reader.feed(text)
        next(self._work, None)
        return self._take()

    def end(self) -> list[str]:
        self._reader.end()
        next(self._work, None)
        if not self._has_begun:
            return ["{}"]
        self._unsent += reversed(self._closers)
        self._closers.clear()
        return self._take()

    def _take(self) -> list[str]:
        pieces = [piece for piece in self._unsent if piece]
        self._unsent.clear()
        return pieces

    def _read(self) -> Reading[None]:
        yield
        try:
            if (yield from self._reader.skip_space()) == "{":
                self._has_begun = True
                yield from self._nested("", "{", "}")
        except Malformed:
            pass
        yield from self._reader.rest(drop)

    def _nested(self, before: str, opener: str, closer: str) -> Reading[None]:
        if len(self._closers) == _MAX_DEPTH:
            raise Malformed
        self._reader.skip(1)
        self._unsent += [before, opener]
        self._closers.append(closer)
        separator = ""
        while (first := (yield from self._reader.skip_space())) != closer:
            if first == ",":
                self._reader.skip(1)
                continue
            key = "" if opener == "[" else (yield from self._key())
            yield from self._value(separator + key)
            separator = ", "
        self._reader.skip(1)
        self._unsent.append(self._closers.pop())

    def _key(self) -> Reading[str]:
        key = yield from self._string()
        if (yield from self._reader.skip_space()) != ":":
            raise Malformed
        self._reader.skip(1)
        return f"{key}: "

    def _value(self, before: str) -> Reading[None]:
        first = yield from self._reader.skip_space()
        if first == "{":
            yield from self._nested(before, "{", "}")
        elif first == "[":
            yield from self._nested(before, "[", "]")
        elif first == '"':
            text = yield from self._string()
            self._unsent += [before, text]
        else:
            text = yield from self._scalar()
            self._unsent += [before, text]

    def _string(self) -> Reading[str]:
        if (yield from self._reader.skip_space()) != '"':
            raise Malformed
        pieces: list[str] = []
        yield from self._reader.quoted(pieces.append)
        text = decoded("".join(pieces)[1:-1])
        return json.dumps(encodable(text), ensure_ascii=False)

    def _scalar(self) -> Reading[str]:
        pieces: list[str] = []
        if not (yield from self._reader.matching(_SCALAR, pieces.append)) or not pieces:
            raise Malformed
        word = "".join(pieces)
        word = _NAMES.get(word, word)
        return word if _is_scalar(word) else json.dumps(word)


def _is_scalar(word: str) -> bool:
    try:
        value = json.loads(word)
    except ValueError:
        return False
    return not isinstance(value, float) or math.isfinite(value)
