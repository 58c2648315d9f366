"""Calls as a list of Python calls: Llama 3.2 and 4, ToolACE."""

import ast
import json
import re

from services.gateway.core.parsing.reader import Malformed, Reader, Reading, Take
from services.gateway.core.parsing.sink import Sink

MAX_CALL_CHARACTERS = 65_536
"""A longer call is content: it is parsed as a whole."""

_NAME = re.compile(r"[\w.\-]+")
_PLAIN = re.compile(r"[^\"'()\[\]{}]+")
_NAMES = {"true": True, "false": False, "null": None}
_START, _END = "<|python_start|>", "<|python_end|>"
PYTHONIC_MARKS = (_START, _END)


def read_pythonic(reader: Reader, sink: Sink) -> Reading[None]:
    """[f(a=1), g()] as the whole answer, or between <|python_start|> and <|python_end|>."""
    yield from reader.skip_space()
    yield from reader.starts_with(_START)
    reader.record()
    try:
        if (yield from reader.skip_space()) != "[":
            raise Malformed
        reader.skip(1)
        while (yield from reader.skip_space()) not in ("]", ""):
            yield from _read_call(reader, sink)
            if (yield from reader.skip_space()) == ",":
                reader.skip(1)
    except Malformed:
        sink.content(reader.recorded())
        yield from reader.until((_START,), sink.content)
        return
    yield from reader.starts_with("]")
    yield from reader.skip_space()
    yield from reader.starts_with(_END)


def _read_call(reader: Reader, sink: Sink) -> Reading[None]:
    name: list[str] = []
    if (yield from reader.matching(_NAME, name.append)) != "(":
        raise Malformed
    pieces: list[str] = []
    yield from _nested(reader, pieces.append)
    arguments = _to_json("".join(pieces))
    reader.recorded()
    sink.whole_call("".join(name), arguments)
    reader.record()


def _nested(reader: Reader, take: Take) -> Reading[None]:
    """Passes on a text in parentheses."""
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
    """The keyword arguments of a call, which are literals, as JSON."""
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
    """Reads true, false and null as JSON does."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node
