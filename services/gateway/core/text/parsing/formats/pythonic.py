"""The call format of Llama 3.2, Llama 4 and ToolACE: a list of Python calls."""

import ast
import json
import re
from collections.abc import Container

from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, Take
from services.gateway.core.text.parsing.sink import Sink

MAX_CALL_CHARACTERS = 65_536
"""Limit on the length of a call, since a call is parsed as a whole. Longer calls are content."""

_NO_LIST = re.compile(r"[^\[<]+")
_NAME = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"[^\"'()\[\]{}]+")
_NAMES = {"true": True, "false": False, "null": None}
_START, _END = "<|python_start|>", "<|python_end|>"
PYTHONIC_MARKS = (_START, _END)


def read_pythonic(names: Container[str], reader: Reader, sink: Sink) -> Reading[None]:
    """Reads [f(a=1), g()]. A list at the beginning, or after a start or end mark, is a list of
    calls whatever the names. A list after other text is content if its first name is not in
    `names`.
    """
    is_expected = True

    def said(text: str) -> None:
        nonlocal is_expected
        is_expected = is_expected and not text.strip()
        sink.content(text)

    while character := (yield from reader.matching(_NO_LIST, said)):
        reader.record()
        if character == "<":
            if (yield from reader.starts_with(_START, _END)):
                is_expected = True
            else:
                reader.skip(1)
                said(reader.recorded())
            continue
        try:
            yield from _read_list(None if is_expected else names, reader, sink)
        except Malformed:
            said(reader.recorded())


def _read_list(names: Container[str] | None, reader: Reader, sink: Sink) -> Reading[None]:
    reader.skip(1)
    num_before = sink.num_calls
    while (yield from reader.skip_space()) not in ("]", ""):
        yield from _read_call(names if sink.num_calls == num_before else None, reader, sink)
        if (yield from reader.skip_space()) == ",":
            reader.skip(1)
    if sink.num_calls == num_before:
        raise Malformed
    yield from reader.starts_with("]")
    reader.recorded()


def _read_call(names: Container[str] | None, reader: Reader, sink: Sink) -> Reading[None]:
    pieces: list[str] = []
    following = yield from reader.matching(_NAME, pieces.append)
    name = "".join(pieces)
    if following != "(" or (names is not None and name not in names):
        raise Malformed
    pieces = []
    yield from _nested(reader, pieces.append)
    arguments = _to_json("".join(pieces))
    reader.recorded()
    sink.whole_call(name, arguments)
    reader.record()


def _nested(reader: Reader, take: Take) -> Reading[None]:
    """Reads a parenthesized text and passes it to `take`."""
    depth, size = 0, 0

    def counted(text: str) -> None:
        nonlocal size
        size += len(text)
        if size <= MAX_CALL_CHARACTERS:
            take(text)

    while True:
        character = yield from reader.matching(_PLAIN, counted)
        if not character:
            raise Malformed
        if character in "\"'":
            yield from reader.quoted(counted)
            continue
        depth += 1 if character in "([{" else -1
        reader.skip(1)
        counted(character)
        if depth == 0:
            break
    if size > MAX_CALL_CHARACTERS:
        raise Malformed


def _to_json(arguments: str) -> str:
    """Converts the keyword arguments of a call to JSON. The values must be literals."""
    try:
        call = ast.parse("f" + arguments, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        values = {str(word.arg): _literal(word.value) for word in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed from error


def _literal(node: ast.expr) -> object:
    named = _JsonNames().visit(node)
    return ast.literal_eval(named)


class _JsonNames(ast.NodeTransformer):
    """Replaces the names true, false and null of JSON by Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node
