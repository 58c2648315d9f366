"""Call formats in which each argument is between tags: Qwen 3.5, Qwen3-Coder, DeepSeek V3.2."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.core.text.parsing.formats.schemas import Schemas, is_json, typed_value
from services.gateway.core.text.parsing.reader import Reader, Reading, drop
from services.gateway.core.text.parsing.sink import Sink

_TEXT_ATTRIBUTE = re.compile(r'string\s*=\s*"(true|false)"')
_NAME_ATTRIBUTE = re.compile(r'name\s*=\s*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format. The `outer` tags surround all calls."""

    outer_open: str
    outer_close: str
    call_open: str
    call_close: str
    value_open: str
    value_close: str
    value: Callable[[Schemas, str, str, str], tuple[str, str]]
    """A function that returns the key of a value, and the value as JSON. The function's arguments
    are the schemas, the tool's name, the text of the value's tag, and the value's text.
    """
    name: Callable[[str], str]
    """A function that returns the tool's name from the text of a call's tag."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All tags. Some may be special tokens of the model."""
        outer = self.outer_open, self.outer_close
        return (*outer, self.call_open, self.call_close, self.value_open, self.value_close)


def read_tagged(tags: Tags, schemas: Schemas, reader: Reader, sink: Sink) -> Reading[None]:
    outside = (tags.outer_open, tags.outer_close, tags.call_open)
    is_inside = False
    while marker := (yield from reader.until(outside, drop if is_inside else sink.content)):
        while marker == tags.call_open:
            marker = yield from _read_call(tags, schemas, reader, sink)
        is_inside = marker != tags.outer_close


def _read_call(tags: Tags, schemas: Schemas, reader: Reader, sink: Sink) -> Reading[str]:
    """Reads a call after the call's opening tag. Returns the tag that ended the call. A value or
    call without a closing tag ends at the next opening tag, or at the outer closing tag. A call
    without a closing tag also ends with the text, unless the text was cut.
    """
    head, closed = yield from reader.text_until((">", "<"))
    if not closed:
        return ""
    if closed == "<":  # The model forgot to close the tag.
        reader.unread(closed)
    name = tags.name(head)
    sink.call(name)
    separator = "{"
    ends = (tags.value_open, tags.call_close, tags.call_open, tags.outer_close)
    marker = yield from reader.until(ends, drop)
    while marker == tags.value_open:
        head, _ = yield from reader.text_until((">",))
        text, marker = yield from _read_value(tags, reader)
        if not marker:
            return ""
        key, value = tags.value(schemas, name, head, text)
        sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        separator = ", "
        if marker == tags.value_close:
            marker = yield from reader.until(ends, drop)
    if marker or not reader.was_cut:
        sink.arguments("{}" if separator == "{" else "}")
    return marker


def _read_value(tags: Tags, reader: Reader) -> Reading[tuple[str, str]]:
    """Reads a value. Returns its text, and the tag that ended it. A closing tag of a call is part
    of the value if the value's closing tag follows before the next opening tag.
    """
    ends = (tags.value_close, tags.value_open, tags.call_open)
    text, marker = yield from reader.text_until((*ends, tags.call_close, tags.outer_close))
    if marker in ends or not marker:
        return text, marker
    further, end = yield from reader.text_until(ends)
    if end == tags.value_close:
        return text + marker + further, end
    if not end and reader.was_cut:
        return "", ""
    reader.unread(further + end)
    return text, marker


def _qwen_value(schemas: Schemas, tool: str, head: str, text: str) -> tuple[str, str]:
    key = head.strip()
    text = text.removeprefix("\n").removesuffix("\n")
    return key, typed_value(schemas, tool, key, text)


def _dsml_value(schemas: Schemas, tool: str, head: str, text: str) -> tuple[str, str]:
    key, is_text = _dsml_name(head), _TEXT_ATTRIBUTE.search(head)
    if is_text is None:
        return key, typed_value(schemas, tool, key, text)
    if is_text[1] == "false":
        return key, text.strip() if is_json(text) else typed_value(schemas, tool, key, text)
    return key, json.dumps(text, ensure_ascii=False)


def _dsml_name(head: str) -> str:
    found = _NAME_ATTRIBUTE.search(head)
    return found[1] if found else ""


QWEN_TAGS = Tags(
    outer_open="<tool_call>",
    outer_close="</tool_call>",
    call_open="<function=",
    call_close="</function>",
    value_open="<parameter=",
    value_close="</parameter>",
    value=_qwen_value,
    name=str.strip,
)
"""<tool_call><function=f><parameter=k>v</parameter></function></tool_call>."""
DSML_TAGS = Tags(
    outer_open="<｜DSML｜function_calls>",
    outer_close="</｜DSML｜function_calls>",
    call_open="<｜DSML｜invoke",
    call_close="</｜DSML｜invoke>",
    value_open="<｜DSML｜parameter",
    value_close="</｜DSML｜parameter>",
    value=_dsml_value,
    name=_dsml_name,
)
"""DSML: <｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</…></…>."""
