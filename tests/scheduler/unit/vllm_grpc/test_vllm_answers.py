"""A session's deltas (new tokens of its requests) are converted to messages of vllm.grpc.engine."""

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InternalError, InvalidArgument, ResourceExhausted
from services.scheduler.adapters.vllm_grpc.answers import Answers
from services.scheduler.adapters.vllm_grpc.requests import Generation

pb = vllm_engine_pb2


def generation(*, stream: bool = True, n: int = 1, num_prompt_logprobs: int = 0) -> Generation:
    return Generation(
        request_id="one",
        prompt_token_ids=[5, 6, 7],
        stream=stream,
        requests=[scheduler_pb2.AddRequest(handle=child) for child in range(n)],
        num_prompt_logprobs=num_prompt_logprobs,
    )


def deltas(tokens: dict[int, list[int]], **fields: Any) -> scheduler_pb2.StepDeltas:
    return scheduler_pb2.StepDeltas(
        handles=tokens,
        num_tokens=map(len, tokens.values()),
        token_ids=[token for ids in tokens.values() for token in ids],
        **fields,
    )


def finished(reason: int, handle: int = 0, **fields: Any) -> list[scheduler_pb2.Finished]:
    return [scheduler_pb2.Finished(handle=handle, reason=reason, **fields)]


def rows(width: int, tokens: list[int], logprobs: list[float]) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(width=width, token_ids=tokens, logprobs=logprobs)


def test_each_answer_gets_a_chunk_of_a_delta() -> None:
    answers = Answers(generation(n=2))
    admitted = [scheduler_pb2.Admitted(handle=1, num_cached_tokens=2)]
    one, two = answers.take(deltas({0: [8, 9], 1: [10]}, admitted=admitted))
    assert (list(one.chunk.token_ids), one.chunk.index, one.chunk.cached_tokens) == ([8, 9], 0, 0)
    assert (list(two.chunk.token_ids), two.chunk.index, two.chunk.cached_tokens) == ([10], 1, 2)
    assert answers.num_open == 2


def test_an_end_has_all_tokens_and_the_stop_token() -> None:
    answers = Answers(generation(stream=False))
    assert list(answers.take(deltas({0: [8]}))) == []
    stop = finished(common_pb2.FINISH_REASON_STOP, stop_token_id=9)
    (end,) = answers.take(deltas({0: [9]}, finished=stop))
    assert (list(end.complete.output_ids), end.complete.finish_reason) == ([8, 9], "stop")
    assert (end.complete.matched_token_id, answers.num_open) == (9, 0)


def test_prompt_logprobs_of_several_steps_come_with_the_first_token() -> None:
    answers = Answers(generation(num_prompt_logprobs=1))
    chunks = [rows(2, [6, 60], [-1.0, -0.5]), rows(2, [7, 7], [-2.0, -2.0])]
    for prompt in chunks:
        item = [scheduler_pb2.RequestLogprobs(handle=0, prompt=prompt)]
        assert list(answers.take(deltas({}, logprobs=item))) == []
    sampled = rows(3, [8, 8, 80], [-0.25, -0.25, -3.0])
    item = [scheduler_pb2.RequestLogprobs(handle=0, sampled=sampled)]
    (first,) = answers.take(deltas({0: [8]}, logprobs=item))
    prompt_logprobs = first.chunk.input_logprobs
    assert list(prompt_logprobs.token_ids) == [5, 6, 7]
    assert [one.HasField("value") for one in prompt_logprobs.token_logprobs] == [False, True, True]
    assert [list(top.token_ids) for top in prompt_logprobs.top_logprobs] == [[], [60], [7]]
    output = first.chunk.output_logprobs
    assert (list(output.token_ids), list(output.token_logprobs)) == ([8], [-0.25])
    assert [list(top.token_ids) for top in output.top_logprobs] == [[8, 80]]
    (second,) = answers.take(deltas({0: [9]}))
    assert not second.chunk.HasField("output_logprobs")
    assert not second.chunk.HasField("input_logprobs")


@pytest.mark.parametrize(
    ("reason", "error", "name"),
    [
        (common_pb2.FINISH_REASON_NAN_IN_LOGITS, InternalError, "NAN_IN_LOGITS"),
        (common_pb2.FINISH_REASON_STEP_FAILED, InternalError, "STEP_FAILED"),
        (common_pb2.FINISH_REASON_KV_LOAD_FAILED, InternalError, "KV_LOAD_FAILED"),
        (common_pb2.FINISH_REASON_ERROR, InternalError, "REQUEST_FAILED"),
        (common_pb2.FINISH_REASON_GRAMMAR_ERROR, InvalidArgument, "GRAMMAR_ERROR"),
        (common_pb2.FINISH_REASON_NO_CONFORMING_TOKEN, InvalidArgument, "NO_CONFORMING_TOKEN"),
        (common_pb2.FINISH_REASON_QUEUE_TIMEOUT, ResourceExhausted, "QUEUE_TIMEOUT"),
        (common_pb2.FINISH_REASON_UNSPECIFIED, InternalError, "ENGINE_ERROR"),
    ],
)
def test_an_end_that_is_no_answer_is_a_status(
    reason: int, error: type[Exception], name: str
) -> None:
    answers = Answers(generation())
    with pytest.raises(error, match="what happened") as caught:
        list(answers.take(deltas({}, finished=finished(reason, message="what happened"))))
    assert getattr(caught.value, "error_reason", None) == name
