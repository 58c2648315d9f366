"""The input of custom tools, which is a text instead of a JSON object.

As in vLLM, the prompt describes such a tool as a function with one argument, the text `input`.
"""

import json
import re
from typing import Any

from services.gateway.core.text.parsing.json_string import decoded
from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.text.parsing.sink import encodable

INPUT = "input"
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The text."}},
    "required": [INPUT],
    "additionalProperties": False,
}
_QUOTE = '"'
_INCOMPLETE = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9A-Fa-f]{0,3})?)$")
"""Matches the end of the content of a JSON string if its last escape is incomplete."""


class InputDecoder:
    """Extracts the input of a custom tool's call from the call's arguments, as the model generates
    them.

    If `input` is not the first argument, it is returned at the end of the call. If there is no
    argument `input`, the whole text of the arguments is returned, as in vLLM.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self._arguments: list[str] = []
        self._pieces: list[str] = []
        """The content of the string that is not yet decoded, as JSON text."""
        self._high = ""
        """The first half of a surrogate pair whose second half is missing, or an empty text."""
        self._has_begun = False
        self._work = self._read()
        next(self._work)

    def feed(self, text: str) -> str:
        """Returns the next piece of the input."""
        if not self._has_begun:
            self._arguments.append(text)
        self._reader.feed(text)
        next(self._work, None)
        return self._decoded()

    def end(self) -> str:
        """Returns the last piece of the input."""
        self._reader.end()
        next(self._work, None)
        if not self._has_begun:
            return _input("".join(self._arguments))
        return self._decoded() + encodable(self._high)

    def _read(self) -> Reading[None]:
        yield
        try:
            for mark in "{", _QUOTE:
                if (yield from self._reader.skip_space()) != mark:
                    raise Malformed
                if mark == "{":
                    self._reader.skip(1)
            key = yield from self._reader.json_text()
            if key != f'"{INPUT}"' or (yield from self._reader.skip_space()) != ":":
                raise Malformed
            self._reader.skip(1)
            if (yield from self._reader.skip_space()) != _QUOTE:
                raise Malformed
            self._has_begun = True
            yield from self._reader.quoted(self._pieces.append)
        except Malformed:
            pass
        yield from self._reader.rest(drop)

    def _decoded(self) -> str:
        text = "".join(piece for piece in self._pieces if piece != _QUOTE)
        self._pieces.clear()
        incomplete = _INCOMPLETE.search(text)
        if incomplete is not None:
            self._pieces.append(incomplete[1])
            text = text[: incomplete.start(1)]
        content, self._high = self._high + decoded(text), ""
        if "\ud800" <= content[-1:] <= "\udbff":
            content, self._high = content[:-1], content[-1]
        return encodable(content)


def _input(arguments: str) -> str:
    try:
        read = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    text = read.get(INPUT) if isinstance(read, dict) else None
    return encodable(text) if isinstance(text, str) else arguments
