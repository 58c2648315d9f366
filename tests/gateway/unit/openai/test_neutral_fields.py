"""Field values that request the default behaviour, and accepted fields without effect."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from services.common.errors import InvalidArgument
from services.common.request.adapter import Adapter
from services.gateway.adapters.http.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.adapters.http.exchange.parse import parse_body
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ScoreBody,
    TokenizeBody,
)
from services.gateway.adapters.http.openai.chat import effort_variables, tool_use
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.sampling import check_stream_options, check_texts
from services.gateway.adapters.http.operators.lora_routes import LoadLoraBody
from services.gateway.core.caller import ANYONE
from services.gateway.core.lora_modules import LoraModules
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request_check import of_prompt, prompt_too_long

LIMITS = ModelLimits(8, 8, 100, (), priority_scheduling=False, hidden_size=4)
ASK = [{"role": "user", "content": "hi"}]
BASES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"prompt": "hi"},
    ChatCompletionBody: {"messages": ASK},
    ResponsesBody: {"input": "hi"},
    MessagesBody: {"messages": ASK, "max_tokens": 4},
    CountTokensBody: {"messages": ASK},
    EmbeddingBody: {"input": "hi"},
    ScoreBody: {"text_1": "hi", "text_2": "ho"},
    TokenizeBody: {"messages": ASK},
}

# The default values of vLLM 0.32 and some earlier releases, and those that OpenAI and Anthropic
# document. Each field may also be null.
_PROMPTS = {"truncate_prompt_tokens": None, "truncation_side": None, "mm_processor_kwargs": {}}
_COMPLETIONS = {
    **_PROMPTS,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0.0,
    "response_format": {"type": "text"},
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": {"include_usage": False, "continuous_usage_stats": False},
    "temperature": 1.0,
    "top_p": 1.0,
    "user": "",
    "use_beam_search": False,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "watermarking": False,
    "length_penalty": 1,
    "early_stopping": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "priority": 0,
    "request_id": None,
    "session_id": "s",
    "return_tokens_as_token_ids": False,
    "return_token_ids": False,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "cache_salt": None,
    "kv_transfer_params": {},
    "ec_transfer_params": {},
    "vllm_xargs": {},
    "repetition_detection": None,
    "thinking_token_budget": -1,
    "stream_interval": 1,
    "logits_processors": [],
    "guided_json": None,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
}
_TEMPLATES = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "chat_template_content_format": "auto",
    "media_io_kwargs": {},
    "tools": [],
}
_POOLING = {
    **_PROMPTS,
    "user": "",
    "padding": "do_not_pad",
    "request_id": None,
    "priority": 0,
    "cache_salt": None,
    "embed_dtype": "float32",
    "endianness": "native",
    "use_activation": None,
    "additional_data": None,
}
NEUTRAL: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {
        **_COMPLETIONS,
        "echo": False,
        "logprobs": None,
        "best_of": 1,
        "suffix": "",
        "prompt_embeds": None,
        "add_special_tokens": True,
    },
    ChatCompletionBody: {
        **_COMPLETIONS,
        **_TEMPLATES,
        "logprobs": False,
        "top_logprobs": 0,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "include_reasoning": True,
        "reasoning_effort": None,
        "best_of": 1,
        "echo": False,
        "documents": [],
        "return_prompt_text": False,
        "add_special_tokens": False,
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "audio": None,
        "prediction": None,
        "web_search_options": None,
        "verbosity": "medium",
        "store": False,
        "metadata": {},
    },
    ResponsesBody: {
        "background": False,
        "include": [],
        "instructions": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": {},
        "service_tier": "auto",
        "store": False,
        "stream": False,
        "stream_options": {},
        "temperature": 1,
        "text": {},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1,
        "top_k": 0,
        "truncation": "disabled",
        "context_management": [],
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "mm_processor_kwargs": {},
        "priority": 0,
        "enable_response_messages": False,
        "previous_input_messages": None,
        "previous_response": None,
        "structured_outputs": None,
        "logit_bias": {},
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": [],
        "ignore_eos": False,
        "vllm_xargs": {},
    },
    MessagesBody: {
        "metadata": {},
        "output_config": {},
        "stop_sequences": [],
        "stream": False,
        "system": [],
        "temperature": 1.0,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False, "name": None},
        "tools": [],
        "thinking": {"type": "disabled"},
        "context_management": {"edits": []},
        "container": None,
        "diagnostics": None,
        "mcp_servers": [],
        "service_tier": "auto",
        "speed": "standard",
        "inference_geo": None,
        "output_format": None,
        "kv_transfer_params": None,
    },
    CountTokensBody: {"system": "", "tools": [], "tool_choice": None, "thinking": None},
    EmbeddingBody: {**_POOLING, "encoding_format": "float", "dimensions": None},
    ScoreBody: _POOLING,
    TokenizeBody: {**_TEMPLATES, "mm_processor_kwargs": {}, "return_token_strs": False},
}


def parsed(kind: type[BaseModel], added: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    raw = json.dumps({**BASES[kind], **added}).encode()
    return parse_body(raw, kind, ignores_unknown=False)


@pytest.mark.parametrize("kind", NEUTRAL)
def test_each_neutral_value_is_accepted_and_not_named(kind: type[BaseModel]) -> None:
    for name, neutral in NEUTRAL[kind].items():
        for value in (neutral, None):
            body, ignored = parsed(kind, {name: value})
            assert ignored == (), name
            if isinstance(body, CompletionBody | ChatCompletionBody):
                check_stream_options(body)


@pytest.mark.parametrize("kind", NEUTRAL)
def test_neutral_values_are_accepted_together(kind: type[BaseModel]) -> None:
    assert parsed(kind, NEUTRAL[kind])[1] == ()


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        (CompletionBody, {"use_beam_search": True}),
        (CompletionBody, {"length_penalty": 0.5}),
        (CompletionBody, {"suffix": "end"}),
        (CompletionBody, {"logits_processors": ["x"]}),
        (CompletionBody, {"vllm_xargs": {"a": 1}}),
        (ChatCompletionBody, {"best_of": 2}),
        (ChatCompletionBody, {"best_of": True}),
        (ChatCompletionBody, {"echo": True}),
        (ChatCompletionBody, {"audio": {"voice": "alloy", "format": "wav"}}),
        (ChatCompletionBody, {"modalities": ["text", "audio"]}),
        (ChatCompletionBody, {"chat_template": "{{ messages }}"}),
        (ChatCompletionBody, {"documents": [{"text": "x"}]}),
        (ResponsesBody, {"previous_response_id": "r"}),
        (ResponsesBody, {"include": ["message.output_text.logprobs"]}),
        (ResponsesBody, {"ignore_eos": True}),
        (MessagesBody, {"mcp_servers": [{"url": "x"}]}),
        (MessagesBody, {"output_format": {"type": "json_schema"}}),
        (EmbeddingBody, {"padding": "max_length"}),
        (EmbeddingBody, {"embed_dtype": "float16"}),
    ],
)
def test_a_value_that_would_change_the_answer_is_refused_by_name(
    kind: type[BaseModel], added: dict[str, Any]
) -> None:
    [name] = added
    with pytest.raises(InvalidArgument, match=f"^{name} is not supported: ") as error:
        parsed(kind, added)
    assert error.value.field == name


_TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "added", "names"),
    [
        (
            MessagesBody,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            ("context_management",),
        ),
        (
            MessagesBody,
            {
                "tools": [
                    {"name": "f", "input_schema": {}, "defer_loading": True},
                    {"name": "g", "input_schema": {}, "defer_loading": True, "x": 1},
                    {"name": "h", "input_schema": {}, "input_examples": [{}]},
                ]
            },
            ("tools.defer_loading", "tools.input_examples"),
        ),
        (
            ChatCompletionBody,
            {"tools": [{**_TOOL, "defer_loading": True}]},
            ("tools.defer_loading",),
        ),
        (
            ChatCompletionBody,
            {"tools": [{**_TOOL, "function": {"name": "f", "defer_loading": True, "returns": {}}}]},
            ("tools.defer_loading",),
        ),
        (
            ResponsesBody,
            {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            ("tools.defer_loading",),
        ),
        (
            ResponsesBody,
            {"tools": [{"type": "web_search", "external_web_access": False}]},
            ("tools.web_search",),
        ),
        (ResponsesBody, {"store": True}, ("store",)),
        (ResponsesBody, {"context_management": [{"type": "compaction"}]}, ("context_management",)),
        (ResponsesBody, {"include": ["reasoning.encrypted_content"]}, ()),
    ],
)
def test_what_is_served_without_its_effect_is_named(
    kind: type[BaseModel], added: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert parsed(kind, added)[1] == names


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CompletionBody, "max_tokens"),
        (CompletionBody, "n"),
        (CompletionBody, "seed"),
        (CompletionBody, "top_k"),
        (CompletionBody, "logprobs"),
        (ChatCompletionBody, "max_completion_tokens"),
        (ResponsesBody, "max_output_tokens"),
        (MessagesBody, "max_tokens"),
        (EmbeddingBody, "dimensions"),
    ],
)
def test_an_integer_may_be_written_with_a_point(kind: type[BaseModel], name: str) -> None:
    value = getattr(parsed(kind, {name: 16.0})[0], name)
    assert (value, type(value)) == (16, int)
    for wrong in (16.5, True, "16", 1e300):
        with pytest.raises(InvalidArgument) as error:
            parsed(kind, {name: wrong})
        assert error.value.field == name


def test_token_ids_may_be_written_with_a_point() -> None:
    for prompt in ([5.0, 6], [[5, 6.0], [7]]):
        body, _ = parsed(CompletionBody, {"prompt": prompt, "stop_token_ids": [3.0]})
        assert json.dumps(body.prompt) == json.dumps(prompt).replace(".0", "")
        assert json.dumps(body.stop_token_ids) == "[3]"
    with pytest.raises(InvalidArgument) as error:
        parsed(CompletionBody, {"prompt": [5, 6.0, 6.5]})
    assert error.value.field == "prompt[2]"


def test_flags_are_no_numbers() -> None:
    with pytest.raises(InvalidArgument):
        parsed(CompletionBody, {"echo": 1})
    with pytest.raises(InvalidArgument):
        parsed(CompletionBody, {"use_beam_search": 0})


def test_structured_outputs_may_be_dumped_with_their_defaults() -> None:
    dumped = {
        "json": None,
        "regex": "a",
        "json_object": False,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "disable_fallback": False,
        "whitespace_pattern": None,
    }
    assert parsed(CompletionBody, {"structured_outputs": dumped})[1] == ()


@pytest.mark.parametrize("value", [[], True, 7])
@pytest.mark.parametrize("name", ["json", "structural_tag"])
def test_an_error_names_no_class_of_the_code(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match="must be a string or an object") as error:
        parsed(CompletionBody, {"structured_outputs": {name: value}})
    assert error.value.field == f"structured_outputs.{name}"


def _unions(schema: Any, path: str) -> list[str]:
    """Paths of unions whose alternatives pydantic tries one after another, so that its errors would
    contain class names.
    """
    if isinstance(schema, list | tuple):
        return [found for item in schema for found in _unions(item, path)]
    if not isinstance(schema, dict):
        return []
    own = [path] if schema.get("type") == "union" else []
    name = str(schema.get("cls", path)) if schema.get("type") == "model" else path
    return own + [found for item in schema.values() for found in _unions(item, name)]


@pytest.mark.parametrize("kind", [*BASES, DetokenizeBody, LoadLoraBody])
def test_alternatives_are_told_apart_before_they_are_read(kind: type[BaseModel]) -> None:
    assert _unions(kind.__pydantic_core_schema__, kind.__name__) == []


def test_effort_reaches_the_template_on_every_server() -> None:
    assert effort_variables(None) == {}
    assert effort_variables("low") == {"reasoning_effort": "low", "enable_thinking": True}
    assert effort_variables("none") == {"reasoning_effort": "none", "enable_thinking": False}


def test_the_default_choice_without_tools_is_none() -> None:
    for tools in ([], None):
        body, _ = parsed(ChatCompletionBody, {"tool_choice": "auto", "tools": tools})
        assert tool_use(body).choice == "none"


def test_an_error_says_which_of_several_texts_is_at_fault() -> None:
    check_texts(["a", "b"], "prompt")
    for texts, field in (([""], "prompt"), (["a", ""], "prompt[1]")):
        with pytest.raises(InvalidArgument) as error:
            check_texts(texts, "prompt")
        assert error.value.field == field
    body, _ = parsed(EmbeddingBody, {})
    said = body.in_client_words(of_prompt(prompt_too_long("9 tokens", LIMITS), 3, 5))
    assert (said.field, said.error_reason) == ("input[3]", "CONTEXT_LENGTH_EXCEEDED")
    assert said.message.endswith(
        "8 tokens: input[3] has 9 tokens, which leaves no room for an answer"
    )
    body, _ = parsed(ScoreBody, {})
    said = body.in_client_words(of_prompt(prompt_too_long("9 tokens", LIMITS), 3, 5))
    assert (said.field, " text_2 has 9 tokens" in said.message) == ("text_2", True)


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_the_texts_to_score_have_vllms_other_names(first: str, second: str) -> None:
    raw = json.dumps({first: "hi", second: ["ho"]}).encode()
    body, ignored = parse_body(raw, ScoreBody, ignores_unknown=False)
    assert (body.text_1, body.text_2, ignored) == ("hi", ["ho"], ())


def test_an_unknown_model_is_answered_with_some_that_there_are() -> None:
    names = [f"a{number}" for number in range(9)]
    inference = object.__new__(Inference)
    inference.model_name, inference.others = "demo", ()
    inference.adapters = LoraModules("demo")
    for name in names:
        inference.adapters.add(Adapter(b"", name, f"/{name}"))
    named = inference._names_for
    assert named(ANYONE).startswith("'demo', 'a0', 'a1', ")
    assert named(ANYONE).endswith("'a6' and 2 more")
