from collections.abc import Callable
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from stepwell.common.v1 import common_pb2

from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs_proto import (
    structured_outputs_from_proto,
    structured_outputs_to_proto,
)
from services.common.request.thinking_budget import ThinkingBudget
from services.common.rpc.proto_fields import require_same_fields

require_same_fields(SamplingParams, common_pb2.SamplingParams.DESCRIPTOR)
require_same_fields(RepetitionDetection, common_pb2.RepetitionDetection.DESCRIPTOR)
require_same_fields(ThinkingBudget, common_pb2.ThinkingBudget.DESCRIPTOR)

_DEFAULTS = SamplingParams()
_NAMES = tuple(field.name for field in fields(SamplingParams))
_values_of = attrgetter(*_NAMES)
_DEFAULT_VALUES = _values_of(_DEFAULTS)


def sampling_from_proto(
    message: common_pb2.SamplingParams, defaults: SamplingParams = _DEFAULTS
) -> SamplingParams:
    """Converts a message, without validation. Absent fields have the values of `defaults`."""
    given: dict[str, Any] = {
        field.name: _READERS[field.name](value) if field.name in _READERS else value
        for field, value in message.ListFields()
    }
    return SamplingParams(**given) if defaults is _DEFAULTS else replace(defaults, **given)


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Converts parameters to their message. Parameters with default values are omitted."""
    given: dict[str, Any] = {
        name: _WRITERS[name](value) if name in _WRITERS else value
        for name, value, default in zip(_NAMES, _values_of(params), _DEFAULT_VALUES, strict=True)
        if value != default
    }
    return common_pb2.SamplingParams(**given)


_READERS: dict[str, Callable[[Any], object]] = {
    "logit_bias_token_ids": tuple,
    "logit_bias_values": tuple,
    "allowed_token_ids": tuple,
    "bad_words": lambda words: tuple(tuple(word.ids) for word in words),
    "stop_token_ids": tuple,
    "eos_token_ids": tuple,
    "repetition_detection": lambda message: RepetitionDetection.of(
        message.max_pattern_size, message.min_pattern_size, message.min_count
    ),
    "structured_outputs": structured_outputs_from_proto,
    "thinking_budget": lambda message: ThinkingBudget(
        message.num_tokens,
        tuple(message.start_token_ids),
        tuple(message.end_token_ids),
        message.begins_inside,
    ),
}
"""Maps each field that is not a plain number to the function that reads it."""

_WRITERS: dict[str, Callable[[Any], object]] = {
    "bad_words": lambda words: [common_pb2.TokenIds(ids=word) for word in words],
    "repetition_detection": lambda repetition: common_pb2.RepetitionDetection(**asdict(repetition)),
    "structured_outputs": structured_outputs_to_proto,
    "thinking_budget": lambda budget: common_pb2.ThinkingBudget(**asdict(budget)),
}
"""Maps each field that consists of messages to the function that writes it."""
