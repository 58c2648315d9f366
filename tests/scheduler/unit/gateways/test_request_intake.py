"""The scheduler's intake: each reason to refuse a request, its gRPC status, and the named field."""

import itertools
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InvalidArgument, OutOfRange, ResourceExhausted
from services.common.pool.block_hash import pack_token_ids
from services.common.replica.queue_state import QueueState
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.gateways.request_intake import RequestIntake
from services.scheduler.core.config import SchedulerConfig

VOCAB_SIZE = 100
HIDDEN_SIZE = 2


def make_intake(*, policy: str = "fcfs", num_waiting: int = 0, cache: int = 40) -> RequestIntake:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=min(50, cache),
        block_size=4,
        num_blocks=11,
        policy=policy,
    )
    queue = QueueState(num_waiting=num_waiting, max_num_waiting=3, max_queue_seconds=0.0)
    return RequestIntake(
        config, VOCAB_SIZE, HIDDEN_SIZE, 50, lambda: queue, itertools.count(1).__next__
    )


def message(**fields: Any) -> scheduler_pb2.AddRequest:
    sampling = common_pb2.SamplingParams(seed=1, max_tokens=5)
    sampling.MergeFrom(common_pb2.SamplingParams(**fields.pop("sampling", {})))
    for name in fields.pop("without", ()):
        sampling.ClearField(name)
    prompt = {"prompt_token_ids": pack_token_ids([7, 8, 9])}
    return scheduler_pb2.AddRequest(
        **{"handle": 4, "request_id": "a", "sampling": sampling} | prompt | fields
    )


def test_what_is_let_in_is_the_cores_own() -> None:
    intake = make_intake(policy="priority")
    request = intake.accept(
        message(
            output_token_ids=pack_token_ids([1, 2]),
            sampling={
                "stop_token_ids": [5],
                "eos_token_ids": [6, 7],
                "min_tokens": 3,
                "repetition_detection": {"max_pattern_size": 9, "min_count": 4},
            },
            priority=-3,
            arrival_unix_nanos=2_500_000_000,
            cache_salt="salt",
            traceparent="00-1-2-01",
        )
    )
    assert (request.request_id, request.key) == ("a", 1)
    assert (request.token_ids, request.num_prompt_tokens) == ([7, 8, 9, 1, 2], 3)
    assert request.sampling == SamplingParams(
        seed=1,
        max_tokens=5,
        stop_token_ids=(5,),
        eos_token_ids=(6, 7),
        min_tokens=3,
        repetition_detection=RepetitionDetection(9, 1, 4),
    )
    assert request.ending_token_ids == {5, 6, 7}
    assert (request.priority, request.arrival_time) == (-3, 2.5)
    assert (request.cache_salt, request.traceparent) == ("salt", "00-1-2-01")
    assert request.reads_prefix_cache
    assert intake.accept(message()).key == 2, "no number is used twice"


def test_the_answers_of_a_request_share_the_memory_of_their_prompt() -> None:
    num_tokens, num_answers = 5000, 20
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=2 * num_tokens,
        block_size=4,
        num_blocks=num_tokens,
    )
    queue = QueueState(0, 100, 0.0)
    key, limit = itertools.count(1).__next__, 2 * num_tokens
    intake = RequestIntake(config, 2 * num_tokens, HIDDEN_SIZE, limit, lambda: queue, key)
    prompt = list(range(1000, 1000 + num_tokens))
    answer = message(prompt_token_ids=pack_token_ids(prompt))
    tracemalloc.start()
    requests = [intake.accept(answer) for _ in range(num_answers)]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 12 * num_tokens * num_answers  # a number takes 32 bytes, and its reference 8
    requests[0].token_ids.append(7)
    assert [request.token_ids for request in requests[1:]] == [prompt] * (num_answers - 1)


def embeds(data: bytes, num_tokens: int = 3) -> common_pb2.PromptEmbeds:
    return common_pb2.PromptEmbeds(
        num_tokens=num_tokens, dtype=common_pb2.EMBEDS_DTYPE_BFLOAT16, data=data
    )


def test_an_embedded_prompt_is_placeholders() -> None:
    request = make_intake().accept(
        message(
            prompt_token_ids=b"",
            prompt_embeds=embeds(bytes(12)),
            output_token_ids=pack_token_ids([8]),
        )
    )
    assert list(request.token_ids) == [0, 0, 0, 8]
    assert request.num_prompt_tokens == 3
    assert request.prompt_embeds == PromptEmbeds(3, EmbedsDtype.BFLOAT16, bytes(12))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_embeds": embeds(bytes(12))}, "prompt_token_ids"),
        ({"prompt_token_ids": b"", "prompt_embeds": embeds(bytes(11))}, "prompt_embeds"),
        ({"prompt_token_ids": b"", "prompt_embeds": embeds(b"", 0)}, "prompt_embeds"),
        (
            {"prompt_token_ids": b"", "prompt_embeds": common_pb2.PromptEmbeds(num_tokens=1)},
            "prompt_embeds.dtype",
        ),
        (
            {
                "prompt_token_ids": b"",
                "prompt_embeds": embeds(bytes(12)),
                "sampling": {"prompt_logprobs": 1},
            },
            "sampling.prompt_logprobs",
        ),
    ],
)
def test_an_embedded_prompt_that_cannot_be(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_intake().accept(message(**fields))
    assert caught.value.field == field


def test_a_client_may_want_its_prompt_computed() -> None:
    request = make_intake().accept(message(skip_reading_prefix_cache=True))
    assert not request.reads_prefix_cache


def test_prompt_logprobs_need_every_position() -> None:
    request = make_intake().accept(message(sampling={"prompt_logprobs": 0}))
    assert not request.reads_prefix_cache


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": b""}, "prompt_token_ids"),
        ({"prompt_token_ids": b"12345"}, "prompt_token_ids"),
        ({"output_token_ids": b"1"}, "output_token_ids"),
        ({"prompt_token_ids": pack_token_ids([1, VOCAB_SIZE])}, "prompt_token_ids"),
        ({"prompt_token_ids": pack_token_ids([1, -1])}, "prompt_token_ids"),
        ({"output_token_ids": pack_token_ids([VOCAB_SIZE])}, "output_token_ids"),
        ({"priority": 1}, "priority"),
        ({"without": ["seed"]}, "sampling.seed"),
        ({"without": ["max_tokens"]}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        (
            {"sampling": {"max_tokens": 2}, "output_token_ids": pack_token_ids([1, 2])},
            "sampling.max_tokens",
        ),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ({"sampling": {"presence_penalty": math.nan}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": 2.5}}, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias_token_ids": [1]}}, "sampling.logit_bias_values"),
        (
            {"sampling": {"logit_bias_token_ids": [1], "logit_bias_values": [math.nan]}},
            "sampling.logit_bias_values",
        ),
        ({"sampling": {"allowed_token_ids": [VOCAB_SIZE]}}, "sampling.allowed_token_ids"),
        ({"sampling": {"stop_token_ids": [VOCAB_SIZE]}}, "sampling.stop_token_ids"),
        ({"sampling": {"eos_token_ids": [VOCAB_SIZE]}}, "sampling.eos_token_ids"),
        (
            {"sampling": {"repetition_detection": {"max_pattern_size": 3}}},
            "sampling.repetition_detection.min_count",
        ),
        ({"sampling": {"bad_words": [common_pb2.TokenIds()]}}, "sampling.bad_words"),
        ({"sampling": {"logprobs": VOCAB_SIZE + 1}}, "sampling.logprobs"),
        ({"sampling": {"prompt_logprobs": VOCAB_SIZE + 1}}, "sampling.prompt_logprobs"),
        (
            {"sampling": {"min_tokens": 1, "allowed_token_ids": [1], "eos_token_ids": [1]}},
            "sampling.min_tokens",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make_intake().accept(message(**fields))
    assert refused.value.field == field
    assert not isinstance(refused.value, OutOfRange)


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "field"),
    [(50, 0, "prompt_token_ids"), (49, 1, "output_token_ids"), (60, 0, "prompt_token_ids")],
)
def test_longer_than_the_model_is_out_of_range(
    num_prompt: int, num_output: int, field: str
) -> None:
    with pytest.raises(OutOfRange) as refused:
        make_intake(cache=80).accept(
            message(
                prompt_token_ids=pack_token_ids([1] * num_prompt),
                output_token_ids=pack_token_ids([1] * num_output),
                sampling={"max_tokens": 20},
            )
        )
    assert (refused.value.error_reason, refused.value.field) == ("LONGER_THAN_MODEL", field)


def test_larger_than_the_pool_is_out_of_range() -> None:
    intake = make_intake(cache=40)
    with pytest.raises(OutOfRange) as refused:
        intake.accept(message(prompt_token_ids=pack_token_ids([1] * 40)))
    assert refused.value.error_reason == "LARGER_THAN_POOL"
    assert intake.accept(message(prompt_token_ids=pack_token_ids([1] * 39))).num_tokens == 39


def test_a_full_queue_says_when_to_come_back() -> None:
    assert make_intake(num_waiting=2).accept(message()).num_tokens == 3
    with pytest.raises(ResourceExhausted) as refused:
        make_intake(num_waiting=3).accept(message())
    assert refused.value.error_reason == "QUEUE_FULL"
    assert refused.value.retry_after_seconds == 1.0


def test_an_adapter_is_refused_by_name_where_none_are_served() -> None:
    digest = bytes(range(32))
    with pytest.raises(InvalidArgument, match="serves no adapters") as refused:
        make_intake().accept(message(adapter={"digest": digest}))
    assert refused.value.field == "adapter"
    serving = make_intake()
    serving = replace(serving, config=replace(serving.config, max_loras=1))
    assert serving.accept(message(adapter={"digest": digest})).adapter_digest == digest
    with pytest.raises(InvalidArgument, match="has 31 bytes") as refused:
        serving.accept(message(adapter={"digest": digest[1:]}))
    assert refused.value.field == "adapter"
