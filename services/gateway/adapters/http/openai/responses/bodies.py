"""The body of OpenAI's responses API, field by field."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.asking_body import StreamedBody, renamed
from services.gateway.adapters.http.exchange.cache_wishes import CacheOptions, CacheRetention
from services.gateway.adapters.http.exchange.fields import (
    Body,
    BodyNotes,
    Ignored,
    Int,
    Only,
    Texts,
    Without,
    by_type,
    choice,
    text_or_list,
    text_or_object,
)
from services.gateway.adapters.http.openai.bodies import Effort
from services.gateway.adapters.http.openai.formats import JsonObjectFormat, JsonSchema, TextFormat
from services.gateway.adapters.http.openai.responses.items import AnyItem, whole_name
from services.gateway.adapters.http.openai.sampling_fields import CommonSamplingFields
from services.gateway.adapters.http.openai.tool_bodies import (
    MAX_TOOLS,
    TOOL_NAME,
    FunctionBody,
    FunctionType,
)
from services.gateway.adapters.http.openai.vllm_fields import UnservedResponsesFields

_NOT_KEPT = "responses are not kept: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_NO_LOGPROBS = "only /v1/completions and /v1/chat/completions return log-probabilities"
_NOT_ASYNC = "the results of all tool calls must be in the next request"
_NO_FILES = "this server reads text only"


def _includable(names: list[str]) -> list[str]:
    """Validates the field `include`. Log-probabilities are refused. Other names have no effect,
    because reasoning is always included, and all further names concern tools that OpenAI runs.
    """
    if _LOGPROBS in names:
        raise PydanticCustomError("not_supported", "{why}", {"why": _NO_LOGPROBS})
    return names


class ResponsesTool(FunctionBody, FunctionType):
    """A function that the client runs. The field `type` is checked first."""

    allowed_callers: Annotated[Any, Only(["direct"], why="only the model calls tools")] = None
    async_: Annotated[Any, Only(False, why=_NOT_ASYNC)] = Field(default=None, alias="async")
    output_schema: Annotated[Any, Only(why="this server does not check the results of tools")] = (
        None
    )


class ResponsesNamespace(Body):
    """Functions under a common name. Codex offers some of its tools so."""

    type: Literal["namespace"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _kind(tool: Any) -> str:
    is_namespace = isinstance(tool, dict) and tool.get("type") == "namespace"
    return "<namespace>" if is_namespace else "<function>"


_Tool = ResponsesTool | ResponsesNamespace
AnyTool = Annotated[
    Annotated[ResponsesTool, Tag("<function>")] | Annotated[ResponsesNamespace, Tag("<namespace>")],
    choice(_kind, "must be an object whose type is function or namespace"),
]


def _unless_search(
    tool: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> _Tool | None:
    """Validates a tool. Returns None for a search of the web, which OpenAI would run. Codex offers
    it by default, so it is left out, and a header of the answer names it.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not (isinstance(kind, str) and kind.startswith("web_search")):
        return cast("_Tool", validate(tool))
    if isinstance(info.context, BodyNotes):
        info.context.ignored.append("tools.web_search")
    return None


def _functions(tools: Sequence[_Tool | None] | None) -> list[tuple[str, str | None, ResponsesTool]]:
    """Returns each function's place in the list, its namespace, and the function."""
    found: list[tuple[str, str | None, ResponsesTool]] = []
    for number, tool in enumerate(tools or ()):
        if isinstance(tool, ResponsesTool):
            found.append((f"[{number}]", None, tool))
        elif tool is not None:
            inner = enumerate(tool.tools)
            found += [(f"[{number}].tools[{place}]", tool.name, one) for place, one in inner]
    return found


def _few(tools: list[_Tool | None]) -> list[_Tool | None]:
    if len(_functions(tools)) > MAX_TOOLS:
        why = f"must have at most {MAX_TOOLS} functions"
        raise PydanticCustomError("too_long", "{why}", {"why": why})
    return tools


ResponsesTools = Annotated[
    list[Annotated[AnyTool, WrapValidator(_unless_search)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(_few),
]
"""Tools. None stands for a search that is left out."""


class ResponsesNamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str = Field(max_length=256)


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[ResponsesNamedTool, Tag("<object>")],
    choice(text_or_object, "must be none, auto, required, or an object that names a function"),
]


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
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None


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
        """All functions, with the names by which the model knows them."""
        return [
            tool.model_copy(update={"name": whole_name(namespace, tool.name)})
            for _, namespace, tool in _functions(self.tools)
        ]

    @property
    def places(self) -> Iterator[str]:
        """The place of each function in `tools`, for errors."""
        return (place for place, _, _ in _functions(self.tools))

    @property
    def namespaced(self) -> dict[str, dict[str, str]]:
        """Maps names by which the model knows functions of namespaces to the two fields that name
        such a function in a call.
        """
        return {
            whole_name(namespace, tool.name): {"name": tool.name, "namespace": namespace}
            for _, namespace, tool in _functions(self.tools)
            if namespace is not None
        }

    def whole_name(self, name: str) -> str:
        """The name by which the model knows a function that `tool_choice` names. A function of a
        namespace may be named without the namespace if no other function has that name.
        """
        names = [
            whole_name(namespace, tool.name)
            for _, namespace, tool in _functions(self.tools)
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
