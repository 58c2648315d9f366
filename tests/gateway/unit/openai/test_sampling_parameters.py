"""The protobuf contract, the dataclass, the request bodies, the command line and the documentation
define the same sampling parameters.
"""

import argparse
import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2

from services.cli.arguments import add_sampling
from services.common.request.messages import sampling_from_proto, sampling_to_proto
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.common.request.thinking_budget import ThinkingBudget
from services.gateway.adapters.http.exchange.program_fields import ProgramFields
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    SamplingBody,
)
from services.gateway.adapters.http.openai.sampling import sampling_from_body, written_parameters
from services.gateway.adapters.http.openai.vllm_fields import UnservedSamplingFields

DOCUMENT = Path(__file__).parents[4] / "docs" / "sampling.md"
NAMES = {field.name for field in fields(SamplingParams)}

# Maps the parameters that have another name in request bodies to this name.
CLIENT_NAMES = {
    "logit_bias_token_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "eos_token_ids": "ignore_eos",
    "thinking_budget": "thinking_token_budget",
}
CLIENT_FIELDS = {CLIENT_NAMES.get(name, name) for name in NAMES}

# Fields of SamplingBody that are no sampling parameters.
OTHER_FIELDS = {
    "model",
    "n",
    "stop",
    "stream",
    "stream_options",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "priority",
    "cache_salt",
    "skip_reading_prefix_cache",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_token_offsets",
    "truncate_prompt_tokens",
    "truncation_side",
    "include_metrics",
    "request_id",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}

# Maps each parameter to a body that sets it and to the resulting value, which is exact in float32.
EXAMPLES: dict[str, tuple[dict[str, Any], object]] = {
    "temperature": ({"temperature": 0.5}, 0.5),
    "top_k": ({"top_k": 7}, 7),
    "top_p": ({"top_p": 0.5}, 0.5),
    "min_p": ({"min_p": 0.25}, 0.25),
    "presence_penalty": ({"presence_penalty": 1.5}, 1.5),
    "frequency_penalty": ({"frequency_penalty": -1.5}, -1.5),
    "repetition_penalty": ({"repetition_penalty": 2.0}, 2.0),
    "logit_bias_token_ids": ({"logit_bias": {"5": 1.0, "3": -2.0}}, (5, 3)),
    "logit_bias_values": ({"logit_bias": {"5": 1.0, "3": -2.0}}, (1.0, -2.0)),
    "allowed_token_ids": ({"allowed_token_ids": [4, 9]}, (4, 9)),
    "bad_words": ({"bad_words": ["ab", "c"]}, ((97, 98), (99,))),
    "seed": ({"seed": -1}, 2**64 - 1),
    "max_tokens": ({"max_tokens": 11}, 11),
    "min_tokens": ({"min_tokens": 2}, 2),
    "stop_token_ids": ({"stop_token_ids": [8]}, (8,)),
    "eos_token_ids": ({}, ()),
    "logprobs": ({"logprobs": 0}, 0),
    "prompt_logprobs": ({"prompt_logprobs": 3}, 3),
    "repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 9, "min_count": 4}},
        RepetitionDetection(9, 1, 4),
    ),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a+"}},
        StructuredOutputs(StructuredOutputsKind.REGEX, "a+"),
    ),
    "thinking_budget": ({}, None),  # only for chats, where it is known when reasoning begins
}


def default(name: str) -> object:
    return getattr(SamplingParams(), name)


async def bad_words(words: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(ord, word)) for word in words)


NOT_WRITTEN = {"bad_words", "eos_token_ids", "thinking_budget", "prompt_logprobs"}
"""Parameters that /render copies from the request body, or that it refuses."""
NO_FLAG = {"min_tokens", "logprobs", "prompt_logprobs"}
"""Numeric parameters for which `stepwell chat` and `complete` have no flag."""

INFERENCE = SimpleNamespace(
    default_sampling=SamplingParams(), texts=SimpleNamespace(bad_words=bad_words), tokenizer=None
)


def test_the_contract_has_the_fields_of_the_dataclass() -> None:
    assert set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == NAMES


def test_request_bodies_have_the_fields_of_the_dataclass() -> None:
    shared = set(SamplingBody.model_fields)
    for body in (CompletionBody, ChatCompletionBody):
        assert set(body.model_fields) >= CLIENT_FIELDS
    shared -= UnservedSamplingFields.model_fields.keys() | ProgramFields.model_fields.keys()
    assert shared | {"logprobs", "thinking_token_budget"} == CLIENT_FIELDS | OTHER_FIELDS


def test_the_documentation_has_a_row_for_each_parameter() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(CLIENT_FIELDS)


def test_worker_or_scheduler_read_each_parameter() -> None:
    services = DOCUMENT.parents[1] / "services"
    read = {
        node.attr
        for part in ("worker/sampling", "worker/core", "scheduler/core")
        for path in (services / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert read >= NAMES


def test_every_parameter_has_an_example() -> None:
    assert EXAMPLES.keys() == NAMES


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_parameter_of_a_body_reaches_the_dataclass(name: str) -> None:
    given, expected = EXAMPLES[name]
    body = CompletionBody(prompt="a", **given)
    params = await sampling_from_body(
        body,
        INFERENCE,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    assert getattr(params, name) == expected
    assert {other for other in NAMES if getattr(params, other) != default(other)} <= {
        other for other, (fields_given, _) in EXAMPLES.items() if fields_given == given
    }


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NOT_WRITTEN])
async def test_render_writes_a_parameter_so_that_it_is_read_again(name: str) -> None:
    body = CompletionBody(prompt="a", **EXAMPLES[name][0])
    read = {"max_tokens": body.max_tokens, "logprobs": body.logprobs, "prompt_logprobs": None}
    params = await sampling_from_body(body, INFERENCE, **read)
    assert getattr(params, name) != default(name)
    again = json.dumps({"prompt": "a", **written_parameters(params)})
    body = CompletionBody.model_validate_json(again)
    assert await sampling_from_body(body, INFERENCE, **read) == params


def test_the_terminal_has_a_flag_for_each_number() -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    numbers = {
        field.name for field in fields(SamplingParams) if field.type in (int, float, int | None)
    }
    assert vars(parser.parse_args([])).keys() - {"model", "stop"} == numbers - NO_FLAG


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_parameter_keeps_its_value_on_the_wire(name: str) -> None:
    no_field = {"eos_token_ids": (2, 6), "thinking_budget": ThinkingBudget(3, (5, 6), (7,), True)}
    expected = no_field.get(name, EXAMPLES[name][1])
    assert expected != default(name)
    params = SamplingParams(**{name: expected})
    packed = sampling_to_proto(params).SerializeToString()
    assert packed, "what differs from the default is sent"
    assert sampling_from_proto(common_pb2.SamplingParams.FromString(packed)) == params


def test_defaults_are_not_sent() -> None:
    assert sampling_to_proto(SamplingParams()).SerializeToString() == b""
