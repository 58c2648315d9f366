"""Fields of vLLM's requests that this server does not support. The server accepts only values that
have no effect.

Clients that serialize vLLM's request classes send these fields with their default values.
"""

from typing import Annotated, Any

from services.gateway.adapters.http.exchange.fields import Body, Ignored, Only

_NO_BEAMS = "this server has no beam search"
_NO_TRANSFER = "the server decides where keys and values are stored"
_NO_MEDIA = "this server reads text only"
_NO_EXTENSIONS = "the server has no extensions"
_NO_TRUNCATION = "prompts are not truncated"
_ONLY_COMPLETIONS = "only /v1/completions and /v1/chat/completions support this field"


class UnservedMediaFields(Body):
    """Unsupported fields of all requests with prompts."""

    mm_processor_kwargs: Annotated[Any, Only({}, why=_NO_MEDIA)] = None


class UnservedPromptFields(UnservedMediaFields):
    """Unsupported fields of requests whose prompts are not truncated."""

    truncate_prompt_tokens: Annotated[Any, Only(why=_NO_TRUNCATION)] = None
    truncation_side: Annotated[Any, Only("left", "right", why=_NO_TRUNCATION)] = None


class UnservedTemplateFields(Body):
    """Unsupported fields of requests with conversations."""

    chat_template: Annotated[Any, Only("", why="the server uses the model's template")] = None
    chat_template_content_format: Annotated[
        Any, Only("auto", why="the server's template determines the form of the content")
    ] = None
    media_io_kwargs: Annotated[Any, Only({}, why=_NO_MEDIA)] = None


class UnservedSamplingFields(UnservedMediaFields):
    """Unsupported fields of completions and chat completions."""

    use_beam_search: Annotated[Any, Only(False, why=_NO_BEAMS)] = None
    length_penalty: Annotated[Any, Only(1, why=_NO_BEAMS)] = None
    early_stopping: Annotated[Any, Only(False, why=_NO_BEAMS)] = None
    watermarking: Annotated[Any, Only(False, why="this server adds no watermark")] = None
    logits_processors: Annotated[Any, Only([], why=_NO_EXTENSIONS)] = None
    logprob_token_ids: Annotated[Any, Only(why="use logprobs")] = None
    thinking_token_budget: Annotated[Any, Only(-1, why="this route does not parse reasoning")] = (
        None
    )
    routed_experts_prompt_start: Annotated[
        Any, Only(0, why="this server does not return routed experts")
    ] = None
    stream_interval: Annotated[
        Any, Only(1, why="the interval is a setting of the server, stream_interval")
    ] = None
    kv_transfer_params: Annotated[Any, Only({}, why=_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[Any, Only({}, why=_NO_TRANSFER)] = None
    guided_whitespace_pattern: Annotated[
        Any, Only(why="the server determines the whitespace of JSON")
    ] = None
    guided_decoding_backend: Annotated[Any, Only("auto", why="this server has one backend")] = None
    # vLLM ignores these fields, too.
    return_mm_kwargs: Ignored = None


class UnservedChatFields(Body):
    """Unsupported fields of chat completions only."""

    best_of: Annotated[Any, Only(1, why="only /v1/completions supports best_of")] = None
    echo: Annotated[Any, Only(False, why="the answer does not repeat the last message")] = None
    documents: Annotated[Any, Only([], why="send the documents as text of the messages")] = None
    return_prompt_text: Annotated[Any, Only(False, why="use return_token_ids")] = None


class UnservedResponsesFields(UnservedPromptFields):
    """Unsupported fields of responses."""

    logit_bias: Annotated[Any, Only({}, why=_ONLY_COMPLETIONS)] = None
    repetition_penalty: Annotated[Any, Only(1, why=_ONLY_COMPLETIONS)] = None
    presence_penalty: Annotated[Any, Only(0, why=_ONLY_COMPLETIONS)] = None
    frequency_penalty: Annotated[Any, Only(0, why=_ONLY_COMPLETIONS)] = None
    ignore_eos: Annotated[Any, Only(False, why=_ONLY_COMPLETIONS)] = None
    stop: Annotated[Any, Only([], "", why=_ONLY_COMPLETIONS)] = None
    include_stop_str_in_output: Annotated[
        Any, Only(False, why="responses have no stop strings")
    ] = None
    skip_special_tokens: Annotated[Any, Only(True, why=_ONLY_COMPLETIONS)] = None
    structured_outputs: Annotated[Any, Only(why="send text.format")] = None
    enable_response_messages: Annotated[Any, Only(False, why="send the earlier items as input")] = (
        None
    )
    previous_input_messages: Annotated[Any, Only([], why="send the earlier items as input")] = None
    previous_response: Annotated[Any, Only(why="send the earlier items as input")] = None
    kv_transfer_params: Annotated[Any, Only({}, why=_NO_TRANSFER)] = None


class UnservedPoolingFields(UnservedMediaFields):
    """Unsupported fields of embeddings and scores."""

    padding: Annotated[Any, Only("do_not_pad", why="prompts are not padded")] = None
    embed_dtype: Annotated[Any, Only("float32", why="vectors are float32")] = None
    endianness: Annotated[Any, Only("native", "little", why="vectors are little-endian")] = None
    additional_data: Annotated[Any, Only(why=_NO_EXTENSIONS)] = None
