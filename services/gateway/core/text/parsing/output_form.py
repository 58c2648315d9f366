"""How the answers of a request are parsed: calls, reasoning, content."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.gateway.core.text.parsing.catalog import ToolFormat
from services.gateway.core.text.parsing.formats.harmony import read_harmony
from services.gateway.core.text.parsing.formats.json_calls import read_call_list
from services.gateway.core.text.parsing.output_parser import FormatParser, OutputParser, ReadAnswer
from services.gateway.core.text.parsing.reader import Reader, Reading
from services.gateway.core.text.parsing.reasoning import ReasoningFormat
from services.gateway.core.text.parsing.sink import Sink


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How to read the answers of one request."""

    tools: ToolFormat | None = None
    """The model's own way to write calls; None: its calls are content."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of the tools' parameters, by the tools' names."""
    is_call_list: bool = False
    """Whether a grammar makes the answer a list of calls, see `read_call_list`."""
    named: str | None = None
    """The tool whose arguments a grammar makes the answer; None: there is none."""
    reasoning: ReasoningFormat | None = None
    """How the model marks its reasoning; None: it is not told apart."""
    begins_in_reasoning: bool = False
    """Whether the prompt ends inside of reasoning."""
    is_harmony: bool = False
    """Whether the answer is read by gpt-oss's channels, with `tools` or without."""
    open_message: str = ""
    """What the prompt has of the message in a channel that the answer goes on with."""
    single_call: bool = False
    """Whether calls after the first are dropped. Without `tools` all in channels are."""

    unserved_fields: tuple[str, ...] = ()
    """Fields of the request that ask for a form to which answers are not held."""

    def make_parser(self) -> OutputParser:
        """The parser of one answer."""
        reads_channels = self._reads_channels
        return FormatParser(
            self._read_answer(),
            None if reads_channels else self.reasoning,
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
