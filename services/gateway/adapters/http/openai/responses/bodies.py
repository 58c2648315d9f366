"""The body of OpenAI's responses API, field by field."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.asking_body import StreamedBody, renamed
from services.gateway.adapters.http.exchange.cache_wishes import CacheOptions, CacheRetention
from services.gateway.adapters.http.exchange.fields import (
    Body,
    Ignored,
    Int,
    Only,
    Texts,
    Without,
    by_type,
    choice,
    text_or_list,
)
from services.gateway.adapters.http.openai.bodies import Effort
from services.gateway.adapters.http.openai.formats import JsonObjectFormat, JsonSchema, TextFormat
from services.gateway.adapters.http.openai.responses.items import AnyItem, whole_name
from services.gateway.adapters.http.openai.responses.tools import (
    CustomTool,
    ResponsesTool,
    ResponsesToolChoice,
    ResponsesTools,
    functions_of,
)
from services.gateway.adapters.http.openai.sampling_fields import CommonSamplingFields
from services.gateway.adapters.http.openai.vllm_fields import UnservedResponsesFields

_NOT_KEPT = "responses are not kept: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_NO_LOGPROBS = "only /v1/completions and /v1/chat/completions return log-probabilities"
_NO_FILES = "this server reads text only"


def _includable(names: list[str]) -> list[str]:
    """Validates the field `include`. Log-probabilities are refused. Other names have no effect,
    because reasoning is always included, and all further names concern tools that OpenAI runs.
    """
    if _LOGPROBS in names:
        raise PydanticCustomError("not_supported", "{why}", {"why": _NO_LOGPROBS})
    return names


class ResponsesJsonSchema(JsonSchema):
    """Requires JSON that conforms to a schema."""

    type: Literal["json_schema"]


class ResponsesText(Body):
    """The format of the answer."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("<text>")]
            | Annotated[JsonObjectFormat, Tag("<json_object>")]
            | Annotated[ResponsesJsonSchema, Tag("<json_schema>")],
            choice(by_type, "must be an object whose type is text, json_object or json_schema"),
        ]
        | None
    ) = None
    verbosity: Annotated[Any, Without("text.verbosity", "medium")] = None


class ResponsesReasoning(Body):
    """The reasoning effort. The answer contains the whole reasoning instead of a summary."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponsesStreamOptions(Body):
    """Options of a stream, which have no effect."""

    include_obfuscation: Annotated[Any, Only(False, why="this server does not pad events")] = None


class ResponsesBody(StreamedBody, CommonSamplingFields, UnservedResponsesFields):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[AnyItem], Field(min_length=1, fail_fast=True), Tag("<list>")],
        choice(text_or_list, "must be a string or a list of items"),
    ]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    reasoning: ResponsesReasoning | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: ResponsesText | None = None
    tool_choice: ResponsesToolChoice | None = None
    tools: ResponsesTools | None = None
    # Extensions of vLLM.
    chat_template_kwargs: dict[str, Any] | None = None
    # Fields without effect.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_tool_calls: Int | None = None
    background: Annotated[
        Any, Only(False, why="this server generates no responses in the background")
    ] = None
    context_management: Annotated[Any, Without("context_management", [])] = None
    conversation: Annotated[Any, Only(why=_NOT_KEPT)] = None
    previous_response_id: Annotated[Any, Only(why=_NOT_KEPT)] = None
    store: Annotated[Any, Without("store", False)] = None
    include: Annotated[Texts, AfterValidator(_includable)] | None = None
    access_programs: Annotated[Any, Only(why="this server has no access programs")] = None
    image: Annotated[Any, Only(why=_NO_FILES)] = None
    moderation: Annotated[Any, Only(why="this server has no moderation")] = None
    prompt: Annotated[Any, Only(why="this server stores no prompts")] = None
    service_tier: Annotated[
        Any, Only("auto", "default", why="this server has one service tier")
    ] = None
    top_logprobs: Annotated[Any, Only(0, why=_NO_LOGPROBS)] = None
    truncation: Annotated[
        Any, Only("disabled", why="this server does not shorten conversations")
    ] = None

    @property
    def functions(self) -> list[ResponsesTool]:
        """All functions, with their names in the prompt."""
        return [
            tool.model_copy(update={"name": whole_name(namespace, tool.name)})
            for _, namespace, tool in functions_of(self.tools)
        ]

    @property
    def places(self) -> Iterator[str]:
        """The path of each function in `tools`, such as `[0].tools[1]`, for errors."""
        return (place for place, _, _ in functions_of(self.tools))

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def namespaced(self) -> dict[str, dict[str, str]]:
        """Maps the names in the prompt of functions of namespaces to the fields `name` and
        `namespace` of a call.
        """
        return {
            whole_name(namespace, tool.name): {"name": tool.name, "namespace": namespace}
            for _, namespace, tool in functions_of(self.tools)
            if namespace is not None
        }

    def whole_name(self, name: str) -> str:
        """The name in the prompt of a function that `tool_choice` names. `tool_choice` may omit the
        function's namespace if no other function has the same name.
        """
        names = [
            whole_name(namespace, tool.name)
            for _, namespace, tool in functions_of(self.tools)
            if tool.name == name
        ]
        return names[0] if len(names) == 1 else name

    def in_client_words(self, error: StepwellError) -> StepwellError:
        names = {
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "session_id": "prompt_cache_key",
            "reasoning_effort": "reasoning.effort",
            "structured_outputs": "tools" if self.form is None else "text.format",
        }
        return renamed(error, names)

    @property
    def form(self) -> JsonObjectFormat | ResponsesJsonSchema | None:
        """The format that the answer must conform to, or None if any text is allowed."""
        form = None if self.text is None else self.text.format
        return None if isinstance(form, TextFormat) else form
