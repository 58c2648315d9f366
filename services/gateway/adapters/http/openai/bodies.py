"""The bodies of requests. These classes check the types of fields, and the core checks ranges."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, ValidationInfo

from services.common.errors import InvalidArgument, StepwellError
from services.gateway.adapters.http.exchange.asking_body import AskingBody, StreamedBody, renamed
from services.gateway.adapters.http.exchange.cache_wishes import CacheOptions, CacheRetention
from services.gateway.adapters.http.exchange.fields import (
    Body,
    HistoryBody,
    Int,
    Only,
    Prompts,
    TextOrTexts,
    TokenIds,
    Without,
    given,
)
from services.gateway.adapters.http.openai import vllm_fields
from services.gateway.adapters.http.openai.content_parts import (
    TextOrParts,
    read,
    said,
    thought,
    without_media,
)
from services.gateway.adapters.http.openai.formats import ResponseFormat, TextFormat
from services.gateway.adapters.http.openai.sampling_fields import SamplingFields
from services.gateway.adapters.http.openai.tool_bodies import ToolCalls, ToolChoice, Tools
from services.gateway.core.request.request import ChatRole

_NO_FUNCTIONS = "send tools and tool_choice"
_NO_SEARCH = "this server does not search the web"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_NO_PREFIX = "to continue the last message, send continue_final_message"


class StreamOptions(Body):
    """Options for additional content of a stream, such as token counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Only(False, why="this server does not pad events")] = None


class TruncationFields(Body):
    """The number of prompt tokens to keep, and the side on which the prompt is truncated."""

    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None


class SamplingBody(
    StreamedBody, SamplingFields, vllm_fields.UnservedSamplingFields, TruncationFields
):
    """The fields that completions and chat completions share."""

    # Fields of OpenAI's API.
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    # Extensions of vLLM.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[
        Any, Only(True, why="spaces between special tokens cannot be turned off")
    ] = None
    add_special_tokens: bool | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Only for /render, as in vLLM.
    return_token_offsets: bool | None = None
    # vLLM's former names for fields of structured_outputs.
    guided_json: Annotated[Any, Only(why="send structured_outputs.json")] = None
    guided_regex: Annotated[Any, Only(why="send structured_outputs.regex")] = None
    guided_choice: Annotated[Any, Only(why="send structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, Only(why="send structured_outputs.grammar")] = None
    # Fields without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Annotated[Any, Only(False, why="this server stores no answers")] = None
    service_tier: Annotated[
        Any, Only("auto", "default", why="this server has one service tier")
    ] = None
    safety_identifier: str | None = None

    def in_client_words(self, error: StepwellError) -> StepwellError:
        error = renamed(error, {"session_id": "prompt_cache_key"})
        of_format = self.response_format is not None and self.structured_outputs is None
        if not of_format or isinstance(self.response_format, TextFormat):
            return error
        return renamed(error, {"structured_outputs": "response_format"})


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [given("prompt"), given("prompt_embeds")]}
    )

    prompt: Prompts | None = None
    # An extension of vLLM. Each text is a safetensors file in base64.
    prompt_embeds: TextOrTexts | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: Annotated[Any, Only("", why="this server cannot insert text before a suffix")] = None


def _readable(content: Any, info: ValidationInfo) -> Any:
    return without_media(content, info) if info.data.get("role") == "tool" else content


class ChatMessage(HistoryBody):
    """One turn of a conversation."""

    role: ChatRole
    content: Annotated[TextOrParts | None, BeforeValidator(_readable)] = None
    name: str | None = None
    # The assistant's refusal, which is sent instead of content.
    refusal: str | None = None
    audio: Annotated[Any, Only(why="audio is not supported")] = None
    function_call: Annotated[Any, Only(why=_NO_FUNCTIONS)] = None
    tool_calls: ToolCalls | None = None
    # In a tool's result: the id of the call.
    tool_call_id: str | None = None
    images: Annotated[Any, Only([], why="images are not supported")] = None
    prefix: Annotated[Any, Only(False, why=_NO_PREFIX)] = None
    partial: Annotated[Any, Only(False, why=_NO_PREFIX)] = None
    # The assistant's reasoning, under the names that vLLM, DeepSeek, OpenRouter and Ollama use. The
    # chat template decides whether the model reads it again.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    def to_template(self, where: str) -> dict[str, Any]:
        """Returns the turn as chat templates expect it. Missing content becomes an empty text.
        Raises InvalidArgument if the turn has tool calls and is not the assistant's. `where` is the
        path of the message in the error.
        """
        content = self.content
        is_text = isinstance(content, str) and content
        turn: dict[str, Any] = {
            "role": self.role,
            "content": [content] if is_text else self._texts(),
        }
        if self.tool_calls:
            if self.role != "assistant":
                field = f"{where}.tool_calls"
                raise InvalidArgument(
                    f"{field}: only messages of role assistant may have tool calls", field=field
                )
            turn["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            turn["name"] = self.name
        if self.role == "assistant":
            named = self.reasoning_content or self.reasoning or self.thinking
            if thoughts := named or thought(content):
                # transformers also passes this text to templates under other common names.
                turn["reasoning_content"] = thoughts
        return turn

    def _texts(self) -> list[str]:
        texts = said(self.content) if self.role == "assistant" else read(self.content)
        return texts if any(texts) or not self.refusal else [self.refusal]


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatTemplateBody(vllm_fields.UnservedTemplateFields):
    """The fields that determine how a conversation is rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class ChatCompletionBody(SamplingBody, ChatTemplateBody, vllm_fields.UnservedChatFields):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    functions: Annotated[Any, Only([], why=_NO_FUNCTIONS)] = None
    function_call: Annotated[Any, Only("none", why=_NO_FUNCTIONS)] = None
    modalities: Annotated[Any, Only([], ["text"], why="this server generates text only")] = None
    audio: Annotated[Any, Only(why="this server generates text only")] = None
    prediction: Annotated[Any, Only(why="predicted outputs are not supported")] = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Int | None = None
    verbosity: Annotated[Any, Without("verbosity", "medium")] = None
    web_search_options: Annotated[Any, Only(why=_NO_SEARCH)] = None
    moderation: Annotated[Any, Only(why="this server has no moderation")] = None

    def in_client_words(self, error: StepwellError) -> StepwellError:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.tools and self.response_format is None and self.structured_outputs is None:
            names["structured_outputs"] = "tools"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return renamed(super().in_client_words(error), names)


class PooledBody(AskingBody, vllm_fields.UnservedPoolingFields, TruncationFields):
    """The fields that embeddings and scores share."""

    user: str | None = None
    # Extensions of vLLM.
    use_activation: bool | None = None


class InputBody(PooledBody):
    """The fields that embeddings, classify and pooling share. `input` has the prompts."""

    input: Prompts
    add_special_tokens: bool | None = None

    def in_client_words(self, error: StepwellError) -> StepwellError:
        return renamed(error, {"prompt": "input"})


class EmbeddingBody(InputBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None


class ScoreBody(PooledBody):
    """POST /score: the scores of pairs of texts. One text is paired with each of many, or two lists
    of equal length are paired item by item.
    """

    text_1: TextOrTexts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: TextOrTexts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2")
    )

    def in_client_words(self, error: StepwellError) -> StepwellError:
        """Returns the error with `text_2` as its field, without the index, because the core numbers
        the prompts of both fields together.
        """
        if error.field is not None and error.field.startswith("prompt["):
            message = error.message.replace(error.field, "text_2", 1)
            return type(error)(message, field="text_2", reason=error.error_reason)
        return renamed(error, {"prompt": "text_2"})


class TokenizeBody(ChatTemplateBody, vllm_fields.UnservedPromptFields):
    """POST /tokenize: plain text in `prompt`, or a conversation in `messages`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("prompt"), given("messages")]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
