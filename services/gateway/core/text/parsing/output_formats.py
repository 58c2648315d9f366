"""The output formats of a server's model. Settings choose them."""

from dataclasses import dataclass

from services.gateway.core.text.parsing.catalog import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
)
from services.gateway.core.text.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats that settings select. The settings have the names of vLLM's flags. An empty
    setting selects no format. If `auto_tools` is true, the model may decide to call tools, in its
    own format.
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
"""The formats of a server whose answers are only content."""
