from collections.abc import Callable
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from stepwell.common.v1 import common_pb2

from services.common.errors import InvalidArgument
from services.common.request.adapter import Adapter
from services.common.request.finish import FinishReason
from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.common.request.program import DeclaredProgram
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import (
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)
from services.common.request.thinking_budget import ThinkingBudget
from services.common.rpc.proto import ProtoEnum, require_same_fields

require_same_fields(StructuredOutputs, common_pb2.StructuredOutputs.DESCRIPTOR)
_KINDS = ProtoEnum(
    StructuredOutputsKind, common_pb2.StructuredOutputsKind, "STRUCTURED_OUTPUTS_KIND_"
)


def structured_outputs_from_proto(message: common_pb2.StructuredOutputs) -> StructuredOutputs:
    """Converts a message, without validation. Raises InvalidArgument for an unknown kind."""
    kind = _KINDS.from_proto(message.kind)
    if kind is None:
        raise invalid("kind is not set, or unknown")
    return StructuredOutputs(kind, message.text)


def structured_outputs_to_proto(wanted: StructuredOutputs) -> common_pb2.StructuredOutputs:
    return common_pb2.StructuredOutputs(kind=_KINDS.to_proto(wanted.kind), text=wanted.text)


require_same_fields(DeclaredProgram, common_pb2.Program.DESCRIPTOR)


def program_from_proto(message: common_pb2.Program) -> DeclaredProgram:
    return DeclaredProgram(
        message.id, message.parent_id, message.tool, message.ends, message.keep_seconds
    )


def program_to_proto(program: DeclaredProgram | None) -> common_pb2.Program | None:
    return None if program is None else common_pb2.Program(**asdict(program))


require_same_fields(PoolingParams, common_pb2.PoolingParams.DESCRIPTOR)
require_same_fields(Pooler, common_pb2.Pooler.DESCRIPTOR)

_TASKS = ProtoEnum(PoolingTask, common_pb2.PoolingTask, "POOLING_TASK_")
_TYPES = ProtoEnum(PoolingType, common_pb2.PoolingType, "POOLING_TYPE_")


def pooling_from_proto(message: common_pb2.PoolingParams) -> PoolingParams:
    return PoolingParams(
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
        num_first_text_tokens=message.num_first_text_tokens,
    )


def pooling_to_proto(params: PoolingParams | None) -> common_pb2.PoolingParams | None:
    if params is None:
        return None
    return common_pb2.PoolingParams(
        dimensions=params.dimensions,
        use_activation=params.use_activation,
        num_first_text_tokens=params.num_first_text_tokens,
    )


def pooler_from_proto(message: common_pb2.Pooler) -> Pooler | None:
    """Converts a message to a pooler. Returns None if a type is unset or unknown."""
    task, kind = _TASKS.from_proto(message.task), _TYPES.from_proto(message.pooling_type)
    if task is None or kind is None:
        return None
    return Pooler(
        task,
        kind,
        message.size,
        may_shorten=message.may_shorten,
        matryoshka_dimensions=tuple(message.matryoshka_dimensions),
        takes_whole_prompts=message.takes_whole_prompts,
    )


def pooler_to_proto(pooler: Pooler | None) -> common_pb2.Pooler | None:
    if pooler is None:
        return None
    return common_pb2.Pooler(
        task=_TASKS.to_proto(pooler.task),
        pooling_type=_TYPES.to_proto(pooler.pooling_type),
        size=pooler.size,
        may_shorten=pooler.may_shorten,
        matryoshka_dimensions=pooler.matryoshka_dimensions,
        takes_whole_prompts=pooler.takes_whole_prompts,
    )


_DTYPES = ProtoEnum(EmbedsDtype, common_pb2.EmbedsDtype, "EMBEDS_DTYPE_")


def prompt_embeds_from_proto(message: common_pb2.PromptEmbeds) -> PromptEmbeds:
    """Converts a message to a matrix. Raises InvalidArgument for an unknown number type."""
    dtype = _DTYPES.from_proto(message.dtype)
    if dtype is None:
        raise InvalidArgument("prompt_embeds.dtype is not set", field="prompt_embeds.dtype")
    return PromptEmbeds(message.num_tokens, dtype, message.data)


def prompt_embeds_to_proto(embeds: PromptEmbeds | None) -> common_pb2.PromptEmbeds | None:
    if embeds is None:
        return None
    return common_pb2.PromptEmbeds(
        num_tokens=embeds.num_tokens, dtype=_DTYPES.to_proto(embeds.dtype), data=embeds.data
    )


_FINISH_REASONS = ProtoEnum(FinishReason, common_pb2.FinishReason, "FINISH_REASON_")

finish_reason_to_proto = _FINISH_REASONS.to_proto
finish_reason_from_proto = _FINISH_REASONS.from_proto


def adapter_to_proto(adapter: Adapter | None) -> common_pb2.Adapter | None:
    if adapter is None:
        return None
    return common_pb2.Adapter(digest=adapter.digest, name=adapter.name, path=adapter.path)


def adapter_from_proto(message: common_pb2.Adapter) -> Adapter:
    return Adapter(message.digest, message.name, message.path)


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
    """Converts a message to parameters, without validation. Absent fields are as in `defaults`."""
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
"""Maps each field of SamplingParams that needs a conversion to the function that converts it."""

_WRITERS: dict[str, Callable[[Any], object]] = {
    "bad_words": lambda words: [common_pb2.TokenIds(ids=word) for word in words],
    "repetition_detection": lambda repetition: common_pb2.RepetitionDetection(**asdict(repetition)),
    "structured_outputs": structured_outputs_to_proto,
    "thinking_budget": lambda budget: common_pb2.ThinkingBudget(**asdict(budget)),
}
"""Maps each field that the proto stores as messages to the function that creates them."""
