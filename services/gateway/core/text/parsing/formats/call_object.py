"""Reads a call that is a JSON object with a name and arguments."""

import json
from collections.abc import Callable, Container

from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.text.parsing.sink import Sink

_ARGUMENTS = ("arguments", "parameters")


def read_call_object(
    reader: Reader,
    sink: Sink,
    *,
    needs_arguments: bool = False,
    names: Container[str] | None = None,
) -> Reading[None]:
    """Reads {"name": …, "arguments": {…}}. "parameters" is also accepted as the key of the
    arguments.

    A call starts when both its name and the start of its arguments were read. If the text turns out
    to be invalid before that, Malformed is raised, and this function's caller treats the text as
    content. A call that is truncated after its start stays incomplete. An object without arguments
    is a call with empty arguments, or raises Malformed if `needs_arguments` is true. If `names` is
    given, an object with any other name raises Malformed.
    """
    call = _Call(sink, reader, names)
    try:
        yield from _read_members(reader, call.member)
    except Malformed:
        if not call.has_started:
            raise
    call.close(needs_arguments=needs_arguments)


def _read_members(reader: Reader, member: Callable[[str], Reading[None]]) -> Reading[None]:
    yield from _expect(reader, "{")
    if (yield from reader.skip_space()) == "}":
        reader.skip(1)
        return
    while True:
        key = yield from _string(reader)
        yield from _expect(reader, ":")
        yield from member(key)
        following = yield from reader.skip_space()
        if following not in (",", "}"):
            raise Malformed
        reader.skip(1)
        if following == "}":
            return


class _Call:
    """Puts a call into the sink while the members of the call's object are read. The name and the
    arguments may be in any order.
    """

    def __init__(self, sink: Sink, reader: Reader, names: Container[str] | None) -> None:
        self.has_started = False
        self._sink = sink
        self._reader = reader
        self._names = names
        self._name: str | None = None
        self._arguments: str | None = None

    def member(self, key: str) -> Reading[None]:
        if key == "name" and not self.has_started:
            self._name = yield from _string(self._reader)
            if self._arguments is not None:
                self._start()
                self._sink.arguments(self._arguments)
        elif key in _ARGUMENTS and not self.has_started and self._arguments is None:
            yield from self._read_arguments()
        else:
            yield from self._reader.json_value(drop)

    def close(self, *, needs_arguments: bool) -> None:
        """Ends the call, whose object has ended, or was truncated after the call's start."""
        if self.has_started:
            return
        if self._name is None or needs_arguments:
            raise Malformed
        self._start()
        self._sink.arguments("{}")

    def _read_arguments(self) -> Reading[None]:
        first = yield from self._reader.skip_space()
        if first == '"':  # The arguments are encoded as a JSON string.
            text = yield from _string(self._reader)
        elif self._name is None:
            text = yield from self._reader.json_text()
        else:
            self._start()
            yield from self._reader.json_value(self._sink.arguments)
            return
        self._arguments = text
        if self._name is not None:
            self._start()
            self._sink.arguments(text)

    def _start(self) -> None:
        assert self._name is not None
        if self._names is not None and self._name not in self._names:
            raise Malformed
        self.has_started = True
        self._reader.recorded()  # Ends the recording, because the text is now certainly a call.
        self._sink.call(self._name)


def _string(reader: Reader) -> Reading[str]:
    if (yield from reader.skip_space()) != '"':
        raise Malformed
    text = yield from reader.json_text()
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise Malformed from error


def _expect(reader: Reader, character: str) -> Reading[None]:
    if (yield from reader.skip_space()) != character:
        raise Malformed
    reader.skip(1)
