"""How a request's answers are parsed into tool calls, reasoning and content."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.gateway.core.text.parsing.catalog import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
)
from services.gateway.core.text.parsing.formats.harmony import read_harmony
from services.gateway.core.text.parsing.formats.json_calls import read_call_list
from services.gateway.core.text.parsing.output_parser import OutputParser, ReadAnswer
from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.reasoning import ReasoningFormat
from services.gateway.core.text.parsing.sink import Sink


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The format of one request's answers."""

    tools: ToolFormat | None = None
    """The model's own format of tool calls. It is None if calls are treated as content."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Maps the names of tools to the JSON schemas of their parameters."""
    is_call_list: bool = False
    """Whether a grammar forces the answer to be a JSON list of calls."""
    named: str | None = None
    """Name of the tool that the answer must call, if there is one. A grammar then forces the answer
    to be the arguments of this tool.
    """
    reasoning: ReasoningFormat | None = None
    """How the model marks its reasoning. It is None if reasoning is not parsed."""
    begins_in_reasoning: bool = False
    """Whether the prompt ends inside reasoning."""
    is_harmony: bool = False
    """Whether the answer is in gpt-oss's harmony format. If `tools` is None, calls in this format
    are dropped.
    """
    open_message: str = ""
    """The start of the unfinished harmony message at the prompt's end. The answer continues it."""
    single_call: bool = False
    """Whether calls after the first call are dropped."""

    unserved_fields: tuple[str, ...] = ()
    """Names of the request's fields whose constraints on the answer are not enforced."""

    def make_parser(self) -> OutputParser:
        reads_channels = self._reads_channels
        return OutputParser(
            self._read_answer(),
            None if reads_channels else self.reasoning,
            call_starts=() if self.tools is None else self.tools.starts,
            begins_in_reasoning=self.begins_in_reasoning and not reads_channels,
            max_calls=self._max_calls,
            before=self.open_message if reads_channels else "",
        )

    @property
    def _max_calls(self) -> int | None:
        if self._reads_channels and self.tools is None:
            return 0
        return 1 if self.single_call else None

    @property
    def _reads_channels(self) -> bool:
        return self.is_harmony and self.named is None and not self.is_call_list

    def _read_answer(self) -> ReadAnswer:
        if self.named is not None:
            return partial(_read_named, self.named)
        if self.is_call_list:
            return read_call_list
        if self.is_harmony:
            return read_harmony
        return _read_content if self.tools is None else self.tools.make(self.schemas)


def _read_content(reader: Reader, sink: Sink) -> Reading[None]:
    yield from reader.rest(sink.content)


def _read_named(name: str, reader: Reader, sink: Sink) -> Reading[None]:
    if not (yield from reader.skip_space()):
        return
    sink.call(name)
    yield from reader.rest(sink.arguments)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats that the gateway's settings select by the names of vLLM's parsers. An empty
    setting selects no format. If `auto_tools` is true, requests may leave it to the model whether
    it calls tools, and the model writes calls in its own format.
    """

    reasoning_parser: str = ""
    tool_call_parser: str = ""
    auto_tools: bool = False

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning_parser)

    @property
    def tools(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.tool_call_parser)

    @property
    def is_harmony(self) -> bool:
        return self.reasoning_parser == HARMONY or self.tool_call_parser == "openai"


NO_FORMATS = OutputFormats()
"""The formats of a server that treats whole answers as content."""
