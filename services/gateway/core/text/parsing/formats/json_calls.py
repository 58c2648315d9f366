"""Call formats in which a call is a JSON object: between tags (Hermes, Qwen), without tags
(Llama 3), or in a list.
"""

import re
from collections.abc import Container

from services.gateway.core.text.parsing.formats.call_object import read_call_object
from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.text.parsing.sink import Sink

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
LLAMA3_MARKS = (_PYTHON_TAG, "<|python_start|>", "<|python_end|>")
_NO_OBJECT = re.compile(r"[^{\[<]+")


def read_hermes(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>."""
    opened = yield from reader.until((_OPEN,), sink.content)
    while opened:
        reader.record()
        try:
            yield from read_call_object(reader, sink)
        except Malformed:
            sink.content(_OPEN + reader.recorded())
            if (yield from reader.until((_CLOSE,), sink.content)):
                sink.content(_CLOSE)
            opened = yield from reader.until((_OPEN,), sink.content)
            continue
        marker = yield from reader.until((_CLOSE, _OPEN), drop)
        opened = marker
        if marker == _CLOSE:
            opened = yield from reader.until((_OPEN,), sink.content)


def read_llama3_json(names: Container[str], reader: Reader, sink: Sink) -> Reading[None]:
    """Reads {"name": …, "parameters": {…}}. There may be several objects, separated by semicolons
    or in a list. An object at the beginning, after a tag, or after a call is a call with any name.
    An object after other text is a call only if its name is in `names`, and otherwise content.
    """
    is_expected = True

    def said(text: str) -> None:
        nonlocal is_expected
        is_expected = is_expected and not text.strip()
        sink.content(text)

    while character := (yield from reader.matching(_NO_OBJECT, said)):
        reader.record()
        if character == "<":
            if (yield from reader.starts_with(*LLAMA3_MARKS)):
                is_expected = True
            else:
                reader.skip(1)
                said(reader.recorded())
            continue
        if character == "[":
            reader.skip(1)
            if (yield from reader.skip_space()) != "{":
                said(reader.recorded())
                continue
        known = None if is_expected else names
        try:
            yield from read_call_object(reader, sink, needs_arguments=True, names=known)
        except Malformed:
            said(reader.recorded())
            continue
        is_expected = True
        ends = ";,]" if character == "[" or sink.num_calls > 1 else ";,"
        while (following := (yield from reader.skip_space())) and following in ends:
            reader.skip(1)


def read_call_list(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads [{"name": …, "arguments": {…}}, …], the format that forced-call grammars produce."""
    reader.record()
    try:
        if (yield from reader.skip_space()) != "[":
            raise Malformed
        reader.skip(1)
        while (yield from reader.skip_space()) == "{":
            yield from read_call_object(reader, sink)
            if (yield from reader.skip_space()) == ",":
                reader.skip(1)
    except Malformed:
        sink.content(reader.recorded())
        return
    yield from reader.starts_with("]")
