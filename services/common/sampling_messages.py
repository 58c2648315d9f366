"""Sampling parameters from their message, for every service that must understand them."""

from typing import Any

from stepwell.common.v1 import common_pb2

from services.common.repetition import RepetitionDetection
from services.common.sampling import SamplingParams

_LISTS = frozenset(
    {
        "logit_bias_token_ids",
        "logit_bias_values",
        "allowed_token_ids",
        "stop_token_ids",
        "eos_token_ids",
    }
)
_ELSEWHERE = frozenset({"max_tokens", "bad_words", "repetition_detection"})


def sampling_from_message(message: common_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message, absent fields at their defaults; not validated."""
    given: dict[str, Any] = {
        field.name: tuple(value) if field.name in _LISTS else value
        for field, value in message.ListFields()
        if field.name not in _ELSEWHERE
    }
    return SamplingParams(
        **given,
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        repetition_detection=repetition_from_message(message),
    )


def repetition_from_message(message: common_pb2.SamplingParams) -> RepetitionDetection | None:
    """What repetition ends the request, if any does; not validated."""
    if not message.HasField("repetition_detection"):
        return None
    wanted = message.repetition_detection
    return RepetitionDetection.of(
        wanted.max_pattern_size, wanted.min_pattern_size, wanted.min_count
    )
