"""In requests of vllm.grpc.engine, each field has its effect or is refused by name."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InvalidArgument, OutOfRange
from services.common.request.messages import sampling_from_proto
from services.scheduler.adapters.vllm_grpc.requests import GenerateConverter, Generation

pb = vllm_engine_pb2
OPENED = scheduler_pb2.SessionOpened(
    max_model_len=100, max_request_tokens=100, vocab_size=1000, eos_token_ids=[2]
)

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.25,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 7,
    "min_tokens": 3,
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "n": 2,
    "logprobs": 3,
    "prompt_logprobs": 0,
    "seed": 17,
    "logit_bias": {8: 0.5, 9: -100.0},
    "truncate_prompt_tokens": 2,
}
"""Maps each supported field of the sampling parameters to a value other than its default."""

WANTED: dict[str, Any] = {
    "stop_token_ids": {"stop_token_ids": (4, 5)},
    "ignore_eos": {"eos_token_ids": ()},
    "logit_bias": {"logit_bias_token_ids": (8, 9), "logit_bias_values": (0.5, -100.0)},
}
"""Maps each field whose value is converted to the resulting parameters."""

TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""Fields about detokenization, without effect because answers contain no text."""

REFUSED: dict[str, Any] = {
    "stop": ["end"],
    "grammar_from_first_token": True,
    "json_schema": "{}",
    "regex": "a*",
    "grammar": "root ::= 'a'",
    "structural_tag": "{}",
    "json_object": True,
    "choice": pb.ChoiceConstraint(choices=["a"]),
}


def convert(client_stops: bool = False, **fields: Any) -> Generation:
    request: dict[str, Any] = {
        "request_id": "one",
        "tokenized": pb.TokenizedInput(input_ids=[10, 11, 12]),
    }
    converter = GenerateConverter(OPENED, client_stops, lambda: 99)
    return converter.convert(pb.GenerateRequest(**request | fields))


def sampling_of(generation: Generation) -> Any:
    return sampling_from_proto(generation.requests[0].sampling)


def test_every_field_of_the_sampling_parameters_is_known_here() -> None:
    """Fails if a new version of the package adds a field."""
    fields = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert fields == {*VALUES, *TEXT_ONLY, *REFUSED}


@pytest.mark.parametrize("name", sorted({*VALUES} - {"n", "truncate_prompt_tokens", "seed"}))
def test_a_field_reaches_the_engine(name: str) -> None:
    plain, value = sampling_of(convert()), VALUES[name]
    sampling = sampling_of(convert(sampling_params=pb.SamplingParams(**{name: value})))
    for field, wanted in WANTED.get(name, {name: value}).items():
        assert getattr(sampling, field) == wanted
        assert getattr(plain, field) != wanted


def test_n_seed_and_truncation_reach_the_engine() -> None:
    generation = convert(sampling_params=pb.SamplingParams(n=2, seed=17, truncate_prompt_tokens=2))
    first, second = generation.requests
    assert (first.request_id, second.request_id) == ("one-0", "one-1")
    assert first.sampling.seed == 17
    assert second.sampling.seed not in (17, 18)
    assert generation.prompt_token_ids == [11, 12]
    assert convert().requests[0].sampling.seed == 99


@pytest.mark.parametrize("name", sorted(TEXT_ONLY))
def test_a_field_about_text_changes_nothing(name: str) -> None:
    assert convert(sampling_params=pb.SamplingParams(**{name: True})) == convert()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_is_not_served_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name) as caught:
        convert(sampling_params=pb.SamplingParams(**{name: REFUSED[name]}))
    assert caught.value.field == f"sampling_params.{name}"


def test_stop_strings_are_left_to_a_client_that_looks_for_them() -> None:
    assert convert(True, sampling_params=pb.SamplingParams(stop=["end"])) == convert()


def test_what_is_too_long_is_not_copied_for_each_answer() -> None:
    """A prompt of millions of tokens or a long id, 128 times, would take gigabytes."""
    many = pb.SamplingParams(n=128)
    too_long = pb.TokenizedInput(input_ids=[10] * 101)
    with pytest.raises(OutOfRange, match="has 101 tokens") as caught:
        convert(tokenized=too_long, sampling_params=many)
    assert (caught.value.field, caught.value.error_reason) == (
        "tokenized.input_ids",
        "LONGER_THAN_MODEL",
    )
    cut = pb.SamplingParams(n=128, truncate_prompt_tokens=-1)
    assert len(convert(tokenized=too_long, sampling_params=cut).prompt_token_ids) == 99
    for request_id in ("", "x" * 1025):
        with pytest.raises(InvalidArgument, match="request_id must have from 1 to 1024") as caught:
            convert(request_id=request_id, sampling_params=many)
    assert convert(request_id="x" * 1024).request_id == "x" * 1024


HONOURED_REQUEST = {"request_id", "tokenized", "sampling_params", "stream", "data_parallel_rank"}


@pytest.mark.parametrize(
    "field",
    [field for field in pb.GenerateRequest.DESCRIPTOR.fields if field.name not in HONOURED_REQUEST],
    ids=lambda field: field.name,
)
def test_every_other_field_of_a_request_is_refused_by_its_name(field: FieldDescriptor) -> None:
    message = pb.GenerateRequest(request_id="one")
    if field.name != "text":
        message.tokenized.input_ids.append(10)
    if field.type == FieldDescriptor.TYPE_STRING:
        setattr(message, field.name, "given")
    elif field.is_repeated:
        getattr(message, field.name).add()
    else:
        getattr(message, field.name).SetInParent()
    with pytest.raises(InvalidArgument, match=field.name) as caught:
        GenerateConverter(OPENED, False, lambda: 1).convert(message)
    assert caught.value.field == field.name


def test_the_only_rank_is_0() -> None:
    assert convert(data_parallel_rank=0) == convert()
    with pytest.raises(InvalidArgument, match="data_parallel_rank"):
        convert(data_parallel_rank=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", -1.0),
        ("max_tokens", 0),
        ("min_tokens", 100),
        ("stop_token_ids", [1000]),
        ("n", 129),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {1000: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 100),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_field_s_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name) as caught:
        convert(sampling_params=pb.SamplingParams(**{name: value}))
    assert caught.value.field == f"sampling_params.{name}"


def test_fewer_tokens_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="min_tokens"):
        convert(sampling_params=pb.SamplingParams(min_tokens=5, max_tokens=4))


def test_the_deadline_of_the_call_bounds_the_queue() -> None:
    converter = GenerateConverter(OPENED, False, lambda: 1)
    message = pb.GenerateRequest(request_id="one", tokenized=pb.TokenizedInput(input_ids=[10]))
    assert converter.convert(message).requests[0].timeout_millis == 0
    assert converter.convert(message, timeout_seconds=2.5).requests[0].timeout_millis == 2500
    assert converter.convert(message, timeout_seconds=0.0).requests[0].timeout_millis == 1
