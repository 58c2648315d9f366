"""Calls as JSON objects: between tags (Hermes, Qwen), on their own (Llama 3), in a list, and as
nothing but arguments.
"""

from services.gateway.core.parsing.formats.call_object import read_call_object
from services.gateway.core.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.parsing.sink import Sink

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
LLAMA3_MARKS = (_PYTHON_TAG,)


def read_hermes(reader: Reader, sink: Sink) -> Reading[None]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them."""
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


def read_llama3_json(reader: Reader, sink: Sink) -> Reading[None]:
    """{"name": …, "parameters": {…}} as the whole answer or after a tag; further ones after ;."""
    first = yield from reader.skip_space()
    if first != "{" and not (yield from reader.until((_PYTHON_TAG,), sink.content)):
        return
    while True:
        reader.record()
        try:
            yield from read_call_object(reader, sink, needs_arguments=True)
        except Malformed:
            sink.content(reader.recorded())
            return
        if (yield from reader.skip_space()) in (";", ","):
            reader.skip(1)
        if (yield from reader.skip_space()) != "{":
            yield from reader.starts_with(_PYTHON_TAG)
        if (yield from reader.skip_space()) != "{":
            return


def read_call_list(reader: Reader, sink: Sink) -> Reading[None]:
    """[{"name": …, "arguments": {…}}, …]: what grammars that force a call are made for."""
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
