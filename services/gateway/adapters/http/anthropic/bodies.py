"""The bodies of Anthropic's messages API, field by field."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.common.errors import StepwellError
from services.gateway.adapters.grammars.tool_calls import CallableTool
from services.gateway.adapters.http.anthropic.blocks import AnthropicMessage
from services.gateway.adapters.http.exchange.asking_body import StreamedBody, renamed
from services.gateway.adapters.http.exchange.cache_wishes import CacheControl, MarkedBody
from services.gateway.adapters.http.exchange.fields import (
    Body,
    Int,
    JsonObject,
    Only,
    Texts,
    Without,
)
from services.gateway.adapters.http.openai.content_parts import TextOrParts
from services.gateway.adapters.http.openai.sampling_fields import CommonSamplingFields
from services.gateway.adapters.http.openai.tool_bodies import (
    DEFERRED,
    MAX_TOOLS,
    TOOL_NAME,
    arguments_schema,
)
from services.gateway.core.request.request_check import CONTEXT_LENGTH_EXCEEDED

_ONE_TIER = "this server has one service tier"
_ONE_PLACE = "the region of inference cannot be chosen"
_NO_ACCOUNTS = "the API key identifies the client"


class AnthropicTool(MarkedBody):
    """A tool that the client runs. Tools that Anthropic defines or runs are not supported."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    allowed_callers: Annotated[Any, Only(["direct"], why="only the model calls tools")] = None
    defer_loading: Annotated[Any, DEFERRED] = None
    input_examples: Annotated[Any, Without("tools.input_examples", [])] = None

    @property
    def callable(self) -> CallableTool:
        return CallableTool(self.name, arguments_schema(self.input_schema), bool(self.strict))

    def to_template(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class AnthropicToolChoice(Body):
    """Whether the model may, must or must not call tools. `name` is the tool that it must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=256)
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError(
                "alternative", "has a name if its type is tool, and only then"
            )
        return self


class Thinking(Body):
    """Whether the model thinks before it answers. `budget_tokens` is the maximum number of tokens
    of the thinking if the type is enabled.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted", "updates"] | None = None
    budget_tokens: Annotated[Int, Field(ge=0)] | None = None


class AnthropicFormat(Body):
    """Requires that the answer is JSON that conforms to a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """The model's effort, and the schema of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: TextOrParts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Extensions of vLLM.
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    # Fields without effect.
    context_management: Annotated[Any, Without("context_management", {}, {"edits": []})] = None
    mcp_servers: Annotated[Any, Only([], why="the client must call the tools")] = None
    speed: Annotated[Any, Only("standard", why=_ONE_TIER)] = None
    user_profile_id: Annotated[Any, Only(why=_NO_ACCOUNTS)] = None
    workspace_id: Annotated[Any, Only(why=_NO_ACCOUNTS)] = None

    def in_client_words(self, error: StepwellError) -> StepwellError:
        """Returns the error, with the core's name of the invalid field replaced by this body's."""
        has_form = self.output_config is not None and self.output_config.format is not None
        names = {
            "prompt": "messages",
            "continue_final_message": "messages",
            "thinking_token_budget": "thinking.budget_tokens",
            "stop": "stop_sequences",
            "structured_outputs": "output_config.format" if has_form else "tools",
        }
        if error.error_reason == CONTEXT_LENGTH_EXCEEDED:
            # Anthropic's clients recognize this error by the beginning of its message.
            message = f"prompt is too long: {error.message}"
            return type(error)(message, field="messages", reason=error.error_reason)
        return renamed(error, names)


class Metadata(Body):
    """The end user for whom the client sends the request. It has no effect."""

    user_id: str | None = None


class MessagesBody(CountTokensBody, StreamedBody, CommonSamplingFields):
    """POST /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: Texts | None = None
    # Refused, with an error code that makes clients send the whole conversation instead.
    thread: dict[str, Any] | None = None
    # Fields without effect.
    metadata: Metadata | None = None
    container: Annotated[Any, Only(why="this server does not execute code")] = None
    diagnostics: Annotated[Any, Without("diagnostics")] = None
    kv_transfer_params: Annotated[
        Any, Only({}, why="the server decides where keys and values are stored")
    ] = None
    output_format: Annotated[Any, Only(why="send output_config.format")] = None
    inference_geo: Annotated[Any, Only(why=_ONE_PLACE)] = None
    service_tier: Annotated[Any, Only("auto", "standard_only", why=_ONE_TIER)] = None
