"""The known formats of models' tool calls and reasoning, named after their parsers in vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.gateway.core.text.parsing.formats import headed_calls
from services.gateway.core.text.parsing.formats.harmony import HARMONY_MARKS, read_harmony
from services.gateway.core.text.parsing.formats.json_calls import (
    LLAMA3_MARKS,
    read_hermes,
    read_llama3_json,
)
from services.gateway.core.text.parsing.formats.pythonic import PYTHONIC_MARKS, read_pythonic
from services.gateway.core.text.parsing.formats.schemas import Schemas
from services.gateway.core.text.parsing.formats.tagged_arguments import (
    DSML_TAGS,
    QWEN_TAGS,
    Tags,
    read_tagged,
)
from services.gateway.core.text.parsing.output_parser import ReadAnswer
from services.gateway.core.text.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class Envelope:
    """The text that a model writes around the arguments of a call, which are JSON. `begin` is the
    text before the arguments, with {name} or {json_name} in place of the tool's name. `trigger` is
    the start of `begin`, and is the same for all tools.
    """

    trigger: str
    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls. If `envelope` is None, grammars cannot constrain the arguments
    of calls in this format. `id_length` is the length of call ids that the chat template requires,
    or None for any length.
    """

    make: Callable[[Schemas], ReadAnswer]
    marks: tuple[str, ...]
    """The texts that delimit calls. Some may be special tokens of the model."""
    starts: tuple[str, ...] = ()
    """Texts that start calls and hardly ever occur elsewhere. Such a text ends reasoning that has
    no end mark.
    """
    envelope: Envelope | None = None
    id_length: int | None = None


def _same(read: ReadAnswer) -> Callable[[Schemas], ReadAnswer]:
    """Adapts a reader that needs no schemas."""
    return lambda _schemas: read


def _tagged(tags: Tags) -> Callable[[Schemas], ReadAnswer]:
    return lambda schemas: partial(read_tagged, tags, schemas)


def _llama3_json(schemas: Schemas) -> ReadAnswer:
    return partial(read_llama3_json, schemas.keys())


def _pythonic(schemas: Schemas) -> ReadAnswer:
    return partial(read_pythonic, schemas.keys())


_HERMES = ToolFormat(
    _same(read_hermes),
    ("<tool_call>", "</tool_call>"),
    ('<tool_call>\n{"name', '<tool_call>{"name'),
    Envelope("<tool_call>", '<tool_call>\n{{"name": {json_name}, "arguments": ', "}\n</tool_call>"),
)
_LLAMA3 = ToolFormat(_llama3_json, LLAMA3_MARKS)
_QWEN_XML = ToolFormat(
    _tagged(QWEN_TAGS), QWEN_TAGS.marks, ("<tool_call>\n<function=", "<tool_call><function=")
)
_PYTHONIC = ToolFormat(_pythonic, PYTHONIC_MARKS)
_DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

TOOL_FORMATS = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "mistral": ToolFormat(
        _same(headed_calls.read_mistral),
        headed_calls.MISTRAL_MARKS,
        ("[TOOL_CALLS]",),
        Envelope("[TOOL_CALLS]", "[TOOL_CALLS]{name}[ARGS]", ""),
        id_length=9,
    ),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "deepseek_v3": ToolFormat(
        _same(headed_calls.read_deepseek_v3),
        headed_calls.DEEPSEEK_MARKS,
        (headed_calls.DEEPSEEK_MARKS[0],),
        Envelope(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```" + _DEEPSEEK_END,
        ),
    ),
    "deepseek_v31": ToolFormat(
        _same(headed_calls.read_deepseek_v31),
        headed_calls.DEEPSEEK_MARKS,
        (headed_calls.DEEPSEEK_MARKS[0],),
        Envelope(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            _DEEPSEEK_END,
        ),
    ),
    "deepseek_v32": ToolFormat(_tagged(DSML_TAGS), DSML_TAGS.marks, (DSML_TAGS.outer_open,)),
    "openai": ToolFormat(_same(read_harmony), HARMONY_MARKS),
}

_THINK = ReasoningFormat("<think>", "</think>")
_ALWAYS_THINK = ReasoningFormat("<think>", "</think>", is_assumed=True)

REASONING_FORMATS = {
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_r1": _ALWAYS_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", answer="<|channel|>final<|message|>"
    ),
}
HARMONY = "openai_gptoss"
"""The name of the harmony format (gpt-oss), in which one reader reads reasoning, calls and
content.
"""
