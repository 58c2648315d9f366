"""Tokens (deltas) for gateways: a session writes what it can at once, and its task the rest."""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.core.request import Request


class Writer:
    """The writer of a local stream. The test decides whether it can write."""

    def __init__(self) -> None:
        self.can_write = True
        self.written: list[scheduler_pb2.SessionResponse] = []

    def write_now(self, response: scheduler_pb2.SessionResponse) -> None:
        assert self.can_write
        self.written.append(response)


def deliver(session: GatewaySession, step: int) -> None:
    session.outbox.tokens(step, [1], [[step]], [step])
    session.flush()


async def test_tokens_are_written_at_once_unless_something_precedes_or_follows_them() -> None:
    writer = Writer()
    session = GatewaySession("a", writer=writer)
    outbox = session.outbox
    session.flush()
    deliver(session, 1)
    deliver(session, 2)
    assert [one.number for one in writer.written] == [1, 2]
    assert [list(one.deltas.token_ids) for one in writer.written] == [[1], [2]]

    writer.can_write = False  # the gateway reads slowly
    deliver(session, 3)
    writer.can_write = True  # the task has not written step 3 yet
    deliver(session, 4)
    assert list(outbox.take().token_ids) == [3, 4]

    outbox.announce(scheduler_pb2.ReplicaState(ready=False))
    deliver(session, 5)
    assert outbox.take_announced() is not None
    assert list(outbox.take().token_ids) == [5]

    outbox.wake()  # as at the session's end
    deliver(session, 6)
    assert list(outbox.take().token_ids) == [6]

    ended = Request("a", 1, [1, 2, 3], 3, SamplingParams(max_tokens=10))
    ended.finish(FinishReason.LENGTH)
    outbox.finished(1, ended)
    deliver(session, 7)
    assert len(outbox.take().finished) == 1
    assert len(writer.written) == 2

    deliver(session, 8)
    assert writer.written[-1].number == 3


async def test_over_grpc_the_task_sends_all_deltas() -> None:
    session = GatewaySession("a")
    deliver(session, 1)
    assert session.outbox.has_deltas
    assert list(session.outbox.take().token_ids) == [1]
