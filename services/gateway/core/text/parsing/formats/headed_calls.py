"""Call formats in which the tool's name precedes the arguments: Mistral's and DeepSeek's."""

import re

from services.gateway.core.text.parsing.formats.json_calls import read_call_list
from services.gateway.core.text.parsing.reader import Malformed, Reader, Reading, drop
from services.gateway.core.text.parsing.sink import Sink

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.\-]+")
MISTRAL_MARKS = (_TOOL_CALLS, _CALL_ID, _ARGS)
DEEPSEEK_MARKS = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEP)


def read_mistral(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads [TOOL_CALLS]name[ARGS]{…}, [TOOL_CALLS]name{…}, and the format of older models:
    [TOOL_CALLS][{"name": …, "arguments": …}].
    """
    opened = yield from reader.until((_TOOL_CALLS,), sink.content)
    while opened:
        if (yield from reader.skip_space()) == "[":
            yield from read_call_list(reader, sink)
            opened = yield from reader.until((_TOOL_CALLS,), sink.content)
            continue
        names: list[str] = []
        if (yield from reader.matching(_NAME, names.append)) == "{" and names:
            marker = _ARGS
        else:
            rest, marker = yield from reader.text_until((_ARGS, _CALL_ID, _TOOL_CALLS))
            names.append(rest)
        if marker == _CALL_ID:
            _, marker = yield from reader.text_until((_ARGS,))
        if marker == _ARGS:
            yield from _arguments(reader, sink, "".join(names))
        else:
            sink.content(_TOOL_CALLS + "".join(names))
        if marker != _TOOL_CALLS:
            opened = yield from reader.until((_TOOL_CALLS,), sink.content)


def read_deepseek_v3(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads calls of DeepSeek V3: a tag, "function", a separator, the name, and the arguments as
    JSON in a code fence. A call that was cut off before the end of its name is dropped.
    """
    while (yield from _next_call(reader, sink)):
        yield from reader.text_until((_SEP,))
        name, marker = yield from reader.text_until(("\n",))
        if not marker:
            return
        yield from reader.skip_space()
        yield from reader.starts_with("```json", "```")
        yield from _arguments(reader, sink, name)


def read_deepseek_v31(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads calls of DeepSeek V3.1: a tag, the name, a separator, and the arguments as JSON. A call
    that was cut off before the end of its name is dropped.
    """
    while (yield from _next_call(reader, sink)):
        name, marker = yield from reader.text_until((_SEP,))
        if not marker:
            return
        yield from _arguments(reader, sink, name)


def _next_call(reader: Reader, sink: Sink) -> Reading[bool]:
    """Reads up to the start of the next call. Returns whether there is one. A pair of outer tags
    surrounds all calls. Text outside these tags is content. Text between calls is dropped.
    """
    take = sink.content if not sink.num_calls else drop
    marker = _CALLS_BEGIN
    while marker in (_CALLS_BEGIN, _CALLS_END, _CALL_END):
        marker = yield from reader.until((_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END), take)
        take = sink.content if marker == _CALLS_END else drop
    return marker == _CALL_BEGIN


def _arguments(reader: Reader, sink: Sink, name: str) -> Reading[None]:
    sink.call(name.strip())
    try:
        yield from reader.json_value(sink.arguments)
    except Malformed:
        return
