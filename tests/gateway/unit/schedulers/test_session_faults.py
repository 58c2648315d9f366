"""The gateway's behaviour if a scheduler sends a wrong message. The tests change each field of a
message in several ways.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from benchmarks.peers.faults import faults_of
from benchmarks.peers.fields import changed
from benchmarks.peers.methods import Direction, Lane
from benchmarks.peers.undetectable import why_undetectable
from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.schedulers.session.deltas import SessionDeltas
from services.gateway.adapters.schedulers.session.numbering import Numbering
from services.gateway.adapters.schedulers.session.reports import check_opened
from services.gateway.adapters.schedulers.session.wrong_message import WrongMessage
from services.gateway.core.request.inflight import Mailbox
from services.gateway.core.request.request import EngineRequest
from tests.gateway.fake_fleet import LIMITS, FakeFleet
from tests.gateway.fake_scheduler import rows_of

SESSION = Lane("/stepwell.scheduler.v1.Scheduler/Session", Direction.RESPONSE)
PROMPT, STOP = [7, 8, 9], 30
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOPPED = common_pb2.FINISH_REASON_STOP


class Session:
    """A session (a gateway's stream) with five requests, whose handles are 1 to 5: a plain request,
    one with log-probabilities, one that a stop token ends, one that is refused, and one that was
    aborted.
    """

    def __init__(self, pooler: Pooler | None = None) -> None:
        world = FakeFleet(1)
        limits = replace(LIMITS, pooler=pooler)
        world.connect("a", limits=limits)
        self.replica = world.replicas["a"]
        self.deltas = SessionDeltas(self.replica, limits)
        pooling = PoolingParams() if pooler else None
        samplings = [
            SamplingParams(max_tokens=4),
            SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1),
            SamplingParams(max_tokens=9, stop_token_ids=(STOP,)),
            SamplingParams(max_tokens=9),
            SamplingParams(max_tokens=9),
        ]
        requests = [
            EngineRequest(f"r{number}", PROMPT, sampling, 0, "", 0, pooling=pooling)
            for number, sampling in enumerate(samplings)
        ]
        self.mailboxes: list[Mailbox] = [world.fleet.start([request]) for request in requests]
        for handle, inflight in self.replica.running.items():
            self.deltas.sent(handle, inflight)
        self.deltas.aborted(5, now=0)
        self.mailboxes[4].close()

    def outcome(self) -> list[Any]:
        """What the clients of the requests have received."""
        return [[repr(delta) for _, delta in mailbox.take()] for mailbox in self.mailboxes]


def deltas(*handles: int, tokens: Sequence[Sequence[int]], **fields: Any) -> Any:
    counts = [len(one) for one in tokens]
    ends = len(fields.get("finished", ())) + len(fields.get("rejected", ()))
    return scheduler_pb2.StepDeltas(
        num_ended=fields.pop("num_ended", ends),
        handles=handles,
        num_tokens=counts,
        num_output_tokens=fields.pop("num_output_tokens", counts),
        token_ids=[token for one in tokens for token in one],
        **fields,
    )


def finished(handle: int, reason: common_pb2.FinishReason, **fields: Any) -> Any:
    times = scheduler_pb2.RequestTimes(queue_nanos=1, prefill_nanos=2, decode_nanos=3)
    return scheduler_pb2.Finished(handle=handle, reason=reason, times=times, **fields)


def first_step() -> scheduler_pb2.StepDeltas:
    rows = scheduler_pb2.RequestLogprobs(
        handle=2, sampled=rows_of([20], 2), prompt=rows_of(PROMPT[1:], 1)
    )
    refused = scheduler_pb2.Rejection(handle=4, code=8, message="full", retry_after_millis=500)
    admitted = [scheduler_pb2.Admitted(handle=one, num_cached_tokens=1) for one in (1, 2, 3)]
    return deltas(
        *(1, 2, 3, 5),
        tokens=[[10, 11], [20], [29], [50]],
        step=7,
        admitted=admitted,
        logprobs=[rows],
        rejected=[refused],
        num_ended=1,
        queue=scheduler_pb2.QueueState(num_waiting=1, max_num_waiting=9, service_seconds=1.5),
        load=scheduler_pb2.ReplicaLoad(num_requests=3, seconds_per_decode=0.1),
    )


def last_step() -> scheduler_pb2.StepDeltas:
    rows = scheduler_pb2.RequestLogprobs(handle=2, sampled=rows_of([21], 2))
    return deltas(
        *(1, 2, 3),
        tokens=[[12], [21], [STOP]],
        num_output_tokens=[3, 2, 2],
        step=8,
        logprobs=[rows],
        finished=[finished(2, LENGTH), finished(3, STOPPED, stop_token_id=STOP)],
        num_ended=3,
    )


def outcome_of(messages: Sequence[bytes]) -> list[Any] | None:
    """What the clients receive after these messages, or None if a message ends the session."""
    session = Session()
    for message in messages:
        try:
            decoded = scheduler_pb2.SessionResponse.FromString(message)
            if decoded.WhichOneof("message") != "deltas":
                return None
            session.deltas.take(decoded.deltas)
        except (WrongMessage, DecodeError):
            return None
    return session.outcome()


MESSAGES = [scheduler_pb2.SessionResponse(deltas=made()) for made in (first_step, last_step)]
STEPS = [message.SerializeToString() for message in MESSAGES]
FAULTS = [fault for fault in faults_of(SESSION) if fault.path[:1] == ("deltas",)]


def test_a_session_in_order_delivers_everything() -> None:
    outcome = str(outcome_of(STEPS))
    assert "[10, 11, 12]" in outcome
    assert "[20, 21]" in outcome
    assert f"[29, {STOP}]" in outcome


@pytest.mark.parametrize("step", [0, 1])
def test_no_changed_field_changes_an_answer_unless_no_check_can_see_it(step: int) -> None:
    """A changed message either ends the session, so that the requests continue at another replica,
    or leaves the answers unchanged.
    """
    expected = outcome_of(STEPS)
    unseen = []
    for fault in FAULTS:
        data = changed(MESSAGES[step], fault.path, fault.change)
        if data is None:
            continue
        outcome = outcome_of([data if at == step else good for at, good in enumerate(STEPS)])
        if outcome is not None and outcome != expected and not why_undetectable(fault):
            unseen.append(str(fault))
    assert not unseen


def wrong(message: scheduler_pb2.StepDeltas, session: Session | None = None) -> str:
    """The reason for which a message ends a session. Clients receive nothing of such a message."""
    session = session or Session()
    with pytest.raises(WrongMessage) as raised:
        session.deltas.take(message)
    assert not any(session.outcome())
    return str(raised.value)


ADMITTED = [scheduler_pb2.Admitted(handle=1)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            deltas(1, tokens=[[3] * 5], admitted=ADMITTED),
            "a request has 5 output tokens, but max_tokens is 4",
        ),
        (deltas(1, tokens=[[320]], admitted=ADMITTED), "token 320 is not in the vocabulary of 320"),
        (deltas(1, tokens=[[3]], admitted=ADMITTED, num_output_tokens=[2]), "has 2 tokens, but 0"),
        (deltas(1, tokens=[[3]]), "not admitted"),
        (deltas(9, tokens=[[3]]), "no request has handle 9"),
        (
            deltas(1, 1, tokens=[[3], [4]], admitted=ADMITTED),
            "2 handles, 1 of them different, 2 counts",
        ),
        (deltas(1, tokens=[[3] * 4], admitted=ADMITTED), "is sent without the request's end"),
        (
            deltas(1, tokens=[[3]], admitted=ADMITTED, finished=[finished(1, LENGTH)]),
            "ended with finish reason FinishReason.LENGTH, but its",
        ),
        (
            deltas(1, tokens=[[3] * 4], admitted=ADMITTED, finished=[finished(1, STOPPED)]),
            "ended with FinishReason.STOP, token None, not FinishReason.LENGTH",
        ),
        (deltas(tokens=[], finished=[finished(1, 99)]), "finish reason 99 is not known"),
        (deltas(tokens=[], finished=[finished(3, 6), finished(3, 6)]), "a request ends twice"),
        (
            deltas(tokens=[], turns=[finished(1, LENGTH)]),
            "is reported for a request without a turn",
        ),
        (
            deltas(tokens=[], rejected=[scheduler_pb2.Rejection(handle=1, code=77)]),
            "a rejection has code 77",
        ),
    ],
)
def test_why_a_message_is_wrong(message: scheduler_pb2.StepDeltas, why: str) -> None:
    assert why in wrong(message)


def test_a_delta_of_the_same_tokens_again_is_noticed() -> None:
    session = Session()
    step = deltas(1, tokens=[[3]], admitted=ADMITTED)
    session.deltas.take(step)
    session.outcome()
    step.ClearField("admitted")
    assert "has 1 tokens, but 1 and now 1 were received" in wrong(step, session)


POOLER = Pooler(PoolingTask.EMBED, PoolingType.CLS, 2)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (b"\0" * 4, "vector of 2 numbers has 4 bytes"),
        (b"\0\0\xc0\x7f" * 2, "contains NaN or infinity"),
        (None, "a prompt ended without its vector"),
    ],
)
def test_a_vector_is_of_the_length_that_was_asked_and_finite(
    values: bytes | None, why: str
) -> None:
    vectors = [] if values is None else [scheduler_pb2.PooledPrompt(handle=1, values=values)]
    end = scheduler_pb2.Finished(handle=1, reason=STOPPED)
    message = scheduler_pb2.StepDeltas(
        admitted=ADMITTED, pooled=vectors, finished=[end], num_ended=1
    )
    assert why in wrong(message, Session(POOLER))


def test_messages_are_taken_in_order_and_once() -> None:
    def check(*numbers: int, taken: Sequence[tuple[int, int]] = ()) -> str:
        numbering = Numbering()
        for _ in range(2):
            add = scheduler_pb2.SessionRequest(add=scheduler_pb2.AddRequest())
            numbering.number(add, now=0.0)
        try:
            for number, sums in zip(numbers, taken or [(0, 0)] * len(numbers), strict=True):
                response = scheduler_pb2.SessionResponse(
                    number=number, taken_number=sums[0], num_taken_requests=sums[1]
                )
                numbering.check(response, now=0.0)
        except WrongMessage as error:
            return str(error)
        return "untaken" if numbering.has_untaken else ""

    assert check(1, 2) == "untaken"
    assert check(1, 3) == "message 3 arrived where 2 is next"
    assert check(1, 1) == "message 1 arrived where 2 is next"
    assert check(1, 2, taken=[(1, 1), (2, 2)]) == ""
    assert check(1, taken=[(3, 2)]) == "message 3 is acknowledged after 0, of 2 sent"
    assert (
        check(1, taken=[(2, 1)]) == "num_taken_requests is 1, but the acknowledged messages have 2"
    )


def test_a_description_is_of_a_model() -> None:
    opened = scheduler_pb2.SessionOpened(
        max_model_len=9, max_request_tokens=9, vocab_size=9, block_size=4, fingerprint=b"f" * 32
    )
    check_opened(opened)
    for field, value in (("vocab_size", 0), ("max_model_len", 2**32 - 1), ("fingerprint", b"f")):
        wrong_one = scheduler_pb2.SessionOpened()
        wrong_one.CopyFrom(opened)
        setattr(wrong_one, field, value)
        with pytest.raises(WrongMessage):
            check_opened(wrong_one)


@pytest.mark.parametrize(
    ("tokens", "num_output", "why"),
    [
        ([4], [2], "has 2 tokens, but 2 and now 1 were received"),
        ([4], [4], "has 4 tokens, but 2 and now 1 were received"),
        ([320], [3], "token 320 is not in the vocabulary of 320"),
        ([STOP], [3], "is sent without the request's end"),
    ],
)
def test_a_step_that_is_like_the_one_before_is_checked_as_much(
    tokens: list[int], num_output: list[int], why: str
) -> None:
    session = Session()
    admitted = [scheduler_pb2.Admitted(handle=3)]
    session.deltas.take(deltas(3, tokens=[[5]], admitted=admitted))
    session.deltas.take(deltas(3, tokens=[[6]], num_output_tokens=[2]))
    session.outcome()
    assert why in wrong(deltas(3, tokens=[tokens], num_output_tokens=num_output), session)


def test_the_last_token_of_a_length_comes_with_the_end() -> None:
    session = Session()
    session.deltas.take(deltas(1, tokens=[[5]], admitted=ADMITTED))
    for number in (2, 3):
        session.deltas.take(deltas(1, tokens=[[6]], num_output_tokens=[number]))
    session.outcome()
    last = deltas(1, tokens=[[6]], num_output_tokens=[4])
    assert "is sent without the request's end" in wrong(last, session)


@pytest.mark.parametrize("in_one_message", [False, True])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_input_that_crosses_the_end_of_its_session_is_rejected_once(
    *, is_given_up: bool, in_one_message: bool
) -> None:
    """The scheduler ends the client session before it receives the input of the next turn."""
    session = Session()
    session.deltas.sent(1, session.replica.running[1])
    ended = [] if is_given_up else [finished(1, common_pb2.FINISH_REASON_ABORT)]
    given_up = [rejection("SESSION_GIVEN_UP")] if is_given_up else []
    late = [rejection("NO_SESSION")]
    if in_one_message:
        session.deltas.take(deltas(tokens=[], finished=ended, rejected=given_up + late, step=7))
    else:
        session.deltas.take(deltas(tokens=[], finished=ended, rejected=given_up, step=7))
        session.deltas.take(deltas(tokens=[], rejected=late, step=7, num_ended=2))
    with pytest.raises(WrongMessage, match="no request has handle 1"):
        session.deltas.take(deltas(tokens=[], rejected=late, step=7, num_ended=3))


def rejection(reason: str) -> scheduler_pb2.Rejection:
    return scheduler_pb2.Rejection(handle=1, code=14, reason=reason, message="unknown")


def test_a_request_is_not_ended_and_rejected() -> None:
    session = Session()
    ended = [finished(1, common_pb2.FINISH_REASON_ABORT)]
    both = deltas(tokens=[], finished=ended, rejected=[rejection("NO_SESSION")], step=7)
    with pytest.raises(WrongMessage):
        session.deltas.take(both)
