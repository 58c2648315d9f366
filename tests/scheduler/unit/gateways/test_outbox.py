"""The outbox of a gateway's stream merges deltas (new tokens) of steps until they are sent."""

import asyncio

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.errors import InvalidArgument, ResourceExhausted
from services.common.replica.queue_state import QueueState
from services.common.request.finish import CLIENT_ERRORS, FinishReason
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.adapters.gateways.outbox import Outbox
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from services.scheduler.core.request import Request

ENDS_WITH_A_STATUS = {
    FinishReason.NAN_IN_LOGITS,
    FinishReason.STEP_FAILED,
    FinishReason.KV_LOAD_FAILED,
    FinishReason.QUEUE_TIMEOUT,
    FinishReason.ERROR,
    *CLIENT_ERRORS,
}


def make_request(name: str = "a") -> Request:
    return Request(name, 1, [1, 2, 3], 3, SamplingParams(max_tokens=10))


async def take(session: GatewaySession) -> scheduler_pb2.StepDeltas:
    async with asyncio.timeout(60):
        await session.outbox.wait()
    return session.outbox.take()


def update(
    step: int,
    requests: list[Request],
    token_ids: list[list[int] | None],
    *,
    logprobs: worker_pb2.RequestLogprobs | None = None,
    start: int = 0,
    is_first: bool = False,
) -> EngineCoreOutputs:
    """The outputs of a step. `logprobs` belong to the first request."""
    new = requests if is_first else []
    starts = [start] * len(requests)
    plan = SchedulerOutput(
        step=step,
        requests=requests,
        num_scheduled_tokens=[1] * len(requests),
        num_computed_tokens=starts,
        new=new,
        num_tokens=len(requests),
    )
    rows = {} if logprobs is None else {0: logprobs}
    ended = [request for request in requests if request.is_finished]
    num_tokens = sum(map(len, filter(None, token_ids)))
    return EngineCoreOutputs(plan, token_ids, rows, ended, num_tokens)


async def test_steps_that_were_not_taken_are_merged() -> None:
    outbox = Outbox()
    outbox.tokens(4, [1], [[10]], [1])
    outbox.flush()
    outbox.tokens(5, [2, 3, 1], [[20, 21], None, [11]], [6, 3, 2])
    outbox.admitted(2, 8)
    outbox.flush()
    deltas = outbox.take()
    assert deltas.step == 5
    assert (list(deltas.handles), list(deltas.num_tokens)) == ([1, 2], [2, 2])
    assert list(deltas.token_ids) == [10, 11, 20, 21]
    assert list(deltas.num_output_tokens) == [2, 6]
    assert [(item.handle, item.num_cached_tokens) for item in deltas.admitted] == [(2, 8)]


async def test_nothing_is_told_twice_and_taking_waits_for_news() -> None:
    outbox = Outbox()
    outbox.tokens(1, [1], [[10]], [1])
    assert not outbox.has_deltas, "a step is sent as a whole"
    outbox.flush()
    assert outbox.has_deltas
    outbox.take()
    waiting = asyncio.create_task(outbox.wait())
    done, _ = await asyncio.wait({waiting}, timeout=0.01)
    assert not done
    outbox.tokens(2, [1], [[11]], [2])
    outbox.flush()
    await waiting
    assert list(outbox.take().token_ids) == [11]


async def test_a_step_without_sampled_tokens_sends_nothing() -> None:
    outbox = Outbox()
    outbox.tokens(1, [1, 2], [[], None], [0, 0])
    outbox.flush()
    assert not outbox.has_deltas


async def test_the_reader_can_be_woken_without_deltas() -> None:
    outbox = Outbox()
    outbox.wake()
    async with asyncio.timeout(60):
        await outbox.wait()
    assert not outbox.has_deltas


@pytest.mark.parametrize("reason", FinishReason)
async def test_every_end_has_its_reason_on_the_wire(reason: FinishReason) -> None:
    outbox, request = Outbox(), make_request()
    if reason in CLIENT_ERRORS:  # sent with a message
        request.fail("what is at fault", reason)
    else:
        request.finish(reason)
    outbox.finished(1, request)
    outbox.flush()
    (finished,) = outbox.take().finished
    name = common_pb2.FinishReason.Name(finished.reason)
    assert name == f"FINISH_REASON_{reason.name}"
    assert bool(finished.message) == (reason in ENDS_WITH_A_STATUS)


async def test_each_session_gets_the_deltas_of_its_requests() -> None:
    sessions = Sessions()
    one, two = sessions.open("one"), sessions.open("two")
    a, b = make_request("a"), make_request("b")
    sessions.own(one, 1, a)
    sessions.own(two, 1, b)
    a.num_cached_tokens, b.num_cached_tokens = 0, 2
    b.finish(FinishReason.LENGTH)
    sessions.deliver(update(3, [a, b], [[5], [6, 7]], is_first=True))
    first, second = await take(one), await take(two)
    assert (list(first.token_ids), len(first.finished)) == ([5], 0)
    assert (list(second.token_ids), len(second.finished)) == ([6, 7], 1)
    assert [item.num_cached_tokens for item in second.admitted] == [2]
    assert (list(one.requests), list(two.requests)) == ([1], [])
    assert (sessions.num_generated_tokens, sessions.num_finished) == (3, 1)


async def test_steps_of_the_same_requests_go_to_the_sessions_that_own_them_then() -> None:
    sessions = Sessions()
    one, two = sessions.open("one"), sessions.open("two")
    a, b, c = make_request("a"), make_request("b"), make_request("c")
    for session, handle, request in ((one, 1, a), (two, 1, b), (one, 2, c)):
        sessions.own(session, handle, request)
    sessions.deliver(update(1, [a, b, c], [[10], [20], [30]]))
    sessions.deliver(update(2, [a, b, c], [[11], None, [31]]))
    first, second = await take(one), await take(two)
    assert (list(first.handles), list(first.token_ids)) == ([1, 2], [10, 11, 30, 31])
    assert (second.step, list(second.token_ids)) == (1, [20])
    assert sessions.close(two) == [b]
    sessions.deliver(update(3, [a, b, c], [[12], [22], [32]]))
    assert list((await take(one)).token_ids) == [12, 32]
    assert not two.outbox.has_deltas


async def test_requests_are_found_by_name_until_they_end() -> None:
    sessions = Sessions()
    session = sessions.open("one")
    a, b = make_request("same"), make_request("same")
    sessions.own(session, 1, a)
    sessions.own(session, 2, b)
    assert sessions.find(["same", "other"]) == [a, b]
    a.finish(FinishReason.ABORT)
    sessions.deliver_ends([a])
    assert sessions.find(["same"]) == [b]


async def test_what_comes_for_a_session_that_is_gone_is_counted_and_dropped() -> None:
    sessions = Sessions()
    session = sessions.open("one")
    request = make_request()
    sessions.own(session, 1, request)
    assert sessions.close(session) == [request]
    assert len(sessions) == 0
    request.finish(FinishReason.ABORT)
    sessions.deliver_ends([request])
    assert (sessions.num_finished, session.outbox.has_deltas) == (1, False)
    assert sessions.close(session) == []


async def test_a_refusal_travels_with_all_that_it_says() -> None:
    session = GatewaySession("one")
    session.reject(1, InvalidArgument("wrong", field="sampling.top_p"))
    session.reject(2, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=0.5))
    first, second = (await take(session)).rejected
    assert first == scheduler_pb2.Rejection(
        handle=1, code=3, reason="INVALID_ARGUMENT", field="sampling.top_p", message="wrong"
    )
    assert second == scheduler_pb2.Rejection(
        handle=2, code=8, reason="QUEUE_FULL", message="full", retry_after_millis=500
    )


def prompt_rows(first: int, count: int, *, sampled: bool = False) -> worker_pb2.RequestLogprobs:
    rows = range(first, first + count)
    item = worker_pb2.RequestLogprobs(
        prompt=common_pb2.Logprobs(
            width=2,
            token_ids=[token for row in rows for token in (row, row + 100)],
            logprobs=[-float(row) for row in rows for _ in range(2)],
            ranks=list(rows),
        )
    )
    if sampled:
        item.sampled.CopyFrom(common_pb2.Logprobs(width=1, token_ids=[9], logprobs=[-1], ranks=[1]))
    return item


async def ranks_told(
    sessions: Sessions, session: GatewaySession, request: Request, *chunks: tuple[int, int]
) -> list[int]:
    """The ranks in the rows that are sent for a prompt, which is computed in `chunks` (pairs of a
    start and a number of tokens).
    """
    for start, count in chunks:
        rows = prompt_rows(start + 1, count)
        sessions.deliver(update(start, [request], [[]], logprobs=rows, start=start))
    told = await take(session)
    return [rank for item in told.logprobs for rank in item.prompt.ranks]


async def test_prompt_rows_come_in_order_as_chunks_are_computed() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)
    assert await ranks_told(sessions, session, request, (0, 4), (4, 3)) == [1, 2, 3, 4, 5, 6, 7]


async def test_prompt_rows_are_not_repeated_after_a_preemption() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)
    assert await ranks_told(sessions, session, request, (0, 4)) == [1, 2, 3, 4]
    again = await ranks_told(sessions, session, request, (0, 3), (3, 3), (6, 2))
    assert again == [5, 6, 7, 8]


async def test_rows_that_are_cut_keep_their_columns_and_what_was_sampled() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)
    await ranks_told(sessions, session, request, (0, 2))
    rows = prompt_rows(1, 4, sampled=True)
    sessions.deliver(update(9, [request], [[9]], logprobs=rows))
    (item,) = (await take(session)).logprobs
    assert item.handle == 1
    assert list(item.prompt.token_ids) == [3, 103, 4, 104]
    assert list(item.prompt.logprobs) == [-3, -3, -4, -4]
    assert (item.prompt.width, list(item.prompt.ranks)) == (2, [3, 4])
    assert list(item.sampled.token_ids) == [9]


async def test_drafts_behind_the_end_of_an_answer_have_no_rows() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)
    cells, values = [5, 6, 7, 8, 9, 10], [-1, -2, -3, -4, -5, -6]
    sampled = common_pb2.Logprobs(width=2, token_ids=cells, logprobs=values, ranks=[1, 2, 3])
    rows = worker_pb2.RequestLogprobs(sampled=sampled)
    sessions.deliver(update(9, [request], [[5, 7]], logprobs=rows))
    (item,) = (await take(session)).logprobs
    assert list(item.sampled.token_ids) == [5, 6, 7, 8]
    assert list(item.sampled.logprobs) == [-1, -2, -3, -4]
    assert list(item.sampled.ranks) == [1, 2]


async def test_a_session_is_sent_the_state_only_after_a_time_without_other_messages() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)

    def announced() -> list[bool]:
        taken = []
        for _ in range(4):
            sessions.announce_to_quiet()
            taken.append(session.outbox.take_announced() is not None)
        return taken

    assert announced() == [False, True, False, True]
    sessions.announce_to_quiet()
    sessions.deliver(update(1, [request], [[9]]))
    assert list((await take(session)).token_ids) == [9]
    assert announced() == [False, True, False, True]


def taken_alone(session: GatewaySession) -> list[str | None]:
    """Takes the messages that are sent without deltas, and returns their kinds."""
    kinds = []
    while (response := session.outbox.take_announced()) is not None:
        kinds.append(response.WhichOneof("message"))
    return kinds


async def test_queue_and_load_go_with_the_next_step() -> None:
    sessions, request = Sessions(), make_request()
    session = sessions.open("one")
    sessions.own(session, 1, request)
    sessions.report(QueueState(2, 4, 0.0, 0.0), 0.25, 0.5)
    assert taken_alone(session) == []
    sessions.deliver(update(1, [request], [[9]]))
    deltas = await take(session)
    assert (list(deltas.token_ids), deltas.queue.num_waiting) == ([9], 2)
    assert (deltas.load.num_requests, deltas.load.seconds_per_prompt_token) == (1, 0.25)
    sessions.report(QueueState(2, 4, 0.0, 0.0), 0.25, 0.5)
    sessions.report(QueueState(2, 4, 0.0, 0.0), 0.25, 0.5)
    assert taken_alone(session) == [], "they have not changed"


async def test_queue_and_load_do_not_wait_for_a_step_for_longer_than_to_the_next_report() -> None:
    sessions = Sessions()
    session = sessions.open("one")
    sessions.own(session, 1, make_request())
    sessions.report(QueueState(2, 4, 0.0, 0.0), 0.25, 0.5)
    assert taken_alone(session) == []
    sessions.report(QueueState(3, 4, 0.0, 0.0), 0.25, 0.5)
    async with asyncio.timeout(60):
        await session.outbox.wait()
    assert taken_alone(session) == ["queue", "load"]


async def test_queue_and_load_are_sent_at_once_where_no_step_follows() -> None:
    sessions = Sessions()
    session = sessions.open("one")
    sessions.report(QueueState(2, 4, 0.0, 0.0), 0.25, 0.5)
    async with asyncio.timeout(60):
        await session.outbox.wait()
    assert taken_alone(session) == ["queue", "load"]
