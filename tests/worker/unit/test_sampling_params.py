"""Invalid sampling parameters are refused with an error that names the parameter."""

import math
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.common.request.sampling import SamplingParams

VOCAB_SIZE = 100

NUMBERS_OUT_OF_RANGE = [
    ("temperature", (-0.1, math.nan, math.inf)),
    ("top_k", (-1,)),
    ("top_p", (0.0, -0.5, 1.01, math.nan)),
    ("min_p", (-0.01, 1.01, math.nan)),
    ("presence_penalty", (-2.1, 2.1, math.nan)),
    ("frequency_penalty", (-2.1, 2.1, math.nan)),
    ("repetition_penalty", (0.0, -1.0, math.inf, math.nan)),
    ("seed", (-1, 2**64)),
    ("min_tokens", (-1,)),
    ("logprobs", (-1, VOCAB_SIZE + 1)),
    ("prompt_logprobs", (-1, VOCAB_SIZE + 1)),
    ("allowed_token_ids", ((3, VOCAB_SIZE), (-1,))),
    ("bad_words", (((1, VOCAB_SIZE),), ((1,), ()))),
    ("stop_token_ids", ((VOCAB_SIZE,), (-1,))),
    ("eos_token_ids", ((VOCAB_SIZE,), (-1,))),
]


def refused_field(params: SamplingParams) -> str | None:
    with pytest.raises(InvalidArgument) as refusal:
        params.validate(VOCAB_SIZE)
    assert refusal.value.field is not None
    assert refusal.value.field in refusal.value.message
    return refusal.value.field


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, bad in NUMBERS_OUT_OF_RANGE for value in bad]
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    assert refused_field(replace(SamplingParams(), **{field: value})) == field


@pytest.mark.parametrize("value", [-100.5, 100.5, math.nan])
def test_a_logit_bias_out_of_range_is_refused_by_name(value: float) -> None:
    params = SamplingParams(logit_bias_token_ids=(1,), logit_bias_values=(value,))
    assert refused_field(params) == "logit_bias_values"


def test_logit_bias_must_be_parallel_and_name_a_token_once() -> None:
    uneven = SamplingParams(logit_bias_token_ids=(1, 2), logit_bias_values=(1.0,))
    assert refused_field(uneven) == "logit_bias_values"
    twice = SamplingParams(logit_bias_token_ids=(1, 1), logit_bias_values=(1.0, 2.0))
    assert refused_field(twice) == "logit_bias_token_ids"
    unknown = SamplingParams(logit_bias_token_ids=(VOCAB_SIZE,), logit_bias_values=(1.0,))
    assert refused_field(unknown) == "logit_bias_token_ids"


def test_a_choice_of_nothing_is_refused() -> None:
    nothing = SamplingParams(allowed_token_ids=(5,), bad_words=((5,),))
    assert refused_field(nothing) == "bad_words"
    only_the_end = SamplingParams(allowed_token_ids=(5,), eos_token_ids=(5,), min_tokens=1)
    assert refused_field(only_the_end) == "min_tokens"
    everything_banned = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB_SIZE)))
    assert refused_field(everything_banned) == "bad_words"


def test_the_ends_of_each_range_are_valid() -> None:
    SamplingParams().validate(VOCAB_SIZE)
    SamplingParams(
        temperature=0.0,
        top_k=10 * VOCAB_SIZE,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias_token_ids=(0, VOCAB_SIZE - 1),
        logit_bias_values=(-100.0, 100.0),
        allowed_token_ids=(1, 2),
        bad_words=((1, 2), (1,)),
        seed=2**64 - 1,
        min_tokens=5,
        stop_token_ids=(1,),
        eos_token_ids=(1,),
        logprobs=VOCAB_SIZE,
        prompt_logprobs=0,
    ).validate(VOCAB_SIZE)
