"""The closed and the open loop of `stepwell bench`, in virtual time, with a fake server."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.cli.bench.core.load_run import LoadRun
from services.cli.bench.core.record import Failure, RequestRecord
from services.cli.bench.core.session import Message, Session, Turn
from services.cli.bench.core.session_run import Budget, SessionRun
from tests.cli.virtual_time import LoopClock, run


class FakeServer:
    """Answers each request after the seconds that `latency` returns for the request's number. If
    the seconds are negative, the request fails. `bodies` are the received bodies, in order.
    """

    def __init__(self, latency: Callable[[int], float]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._latency = latency

    def encode(self, fields: dict[str, Any], output_len: int) -> bytes:
        return json.dumps({**fields, "max_tokens": output_len}).encode()

    async def send(self, request: bytes, record: RequestRecord, *, keep_answer: bool) -> str | None:
        now = asyncio.get_running_loop().time
        record.sent = now()
        self.bodies.append(json.loads(request))
        latency = self._latency(record.number)
        await asyncio.sleep(abs(latency))
        if latency < 0:
            record.failure = Failure("http 500")
            return None
        record.token_times.append(now())
        record.ended = now()
        return f" answer {record.number}" if keep_answer else ""


class NoWatcher:
    def began(self, record: RequestRecord) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


def session(number: int, num_turns: int = 1, think_seconds: float = 0.0) -> Session:
    turns = [
        Turn((Message("user", f"ask {number}.{turn}"),), 4, think_seconds if turn else 0.0)
        for turn in range(num_turns)
    ]
    return Session(number, turns)


@dataclass
class Load:
    """Runs sessions (requests one after another) under given limits, and stores their records."""

    server: FakeServer
    at_most: int | None = None
    num_requests: int | None = None
    seconds: float | None = None
    num_warmups: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    async def send(
        self, sessions: Sequence[Session], clients: int = 0, at: Sequence[float] = ()
    ) -> None:
        """Sends sessions in a closed loop of `clients`. If `clients` is 0, sends them in an open
        loop, at the seconds `at`.
        """
        budget = Budget(self.num_requests, self.seconds, self.num_warmups)
        limit = None if self.at_most is None else asyncio.Semaphore(self.at_most)
        load = LoadRun(LoopClock(), budget)
        runs = (
            SessionRun(
                *(session, self.server, LoopClock(), budget, NoWatcher(), limit, self.records),
                is_chat=False,
            ).run
            for session in sessions
        )
        await (
            load.closed_loop(runs, clients)
            if clients
            else load.open_loop(zip(at, runs, strict=True))
        )


def closed(server: FakeServer, sessions: Sequence[Session], clients: int, **limits: Any) -> Load:
    load = Load(server, **limits)
    run(load.send(sessions, clients))
    return load


def opened(
    server: FakeServer, arrivals: Sequence[tuple[float, Session]], at_most: int | None = None
) -> Load:
    load = Load(server, at_most)
    times, sessions = zip(*arrivals, strict=True)
    run(load.send(sessions, at=times))
    return load


def sent(load: Load) -> list[float]:
    return [round(record.sent or 0.0, 6) for record in load.records]


def test_a_closed_loop_sends_the_next_when_an_answer_has_come() -> None:
    load = closed(FakeServer(lambda _: 1.0), [session(n) for n in range(5)], 2, num_requests=5)
    assert sent(load) == [0, 0, 1, 1, 2]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    load = opened(FakeServer(lambda _: 10.0), [(n / 2, session(n)) for n in range(4)])
    assert sent(load) == [0, 0.5, 1, 1.5]
    assert [record.e2el for record in load.records] == pytest.approx([10] * 4)


def test_waiting_for_a_place_counts_from_the_intended_time() -> None:
    """A slow request delays the next ones. Their latencies must include the delay, otherwise they
    would be too short ("coordinated omission").
    """
    latencies = [3.0, 0.1, 0.1, 0.1]
    server = FakeServer(latencies.__getitem__)
    load = opened(server, [(float(n), session(n)) for n in range(4)], at_most=1)
    assert sent(load) == [0, 3, 3.1, 3.2]
    assert [record.e2el for record in load.records] == pytest.approx([3.0, 2.1, 1.2, 0.3])
    assert [record.schedule_lag for record in load.records] == pytest.approx([0, 2, 1.1, 0.2])


def test_a_conversation_waits_for_its_answer_and_its_user() -> None:
    server = FakeServer(lambda _: 1.0)
    load = opened(server, [(2.0, session(0, num_turns=3, think_seconds=5.0))])
    assert sent(load) == [2, 8, 14]
    assert [record.intended for record in load.records] == pytest.approx([2, 8, 14])
    assert [record.ttft for record in load.records] == pytest.approx([1, 1, 1])
    assert server.bodies[-1]["prompt"] == "ask 0.0 answer 0 ask 0.1 answer 1 ask 0.2"


def test_a_closed_client_thinks_before_the_next_turn() -> None:
    sessions = [session(0, 2, 5.0), session(1)]
    load = closed(FakeServer(lambda _: 1.0), sessions, 1, num_requests=3)
    assert sent(load) == [0, 6, 7]


def test_a_session_ends_with_its_failure_and_a_closed_client_waits_a_little() -> None:
    server = FakeServer(lambda number: -0.5 if number == 0 else 0.5)
    load = closed(server, [session(0, 3), session(1)], 1, num_requests=9)
    assert [(record.session, record.turn) for record in load.records] == [(0, 0), (1, 0)]
    assert sent(load) == [0, 0.6]


def test_the_warm_up_comes_first_and_is_not_counted_among_the_requests() -> None:
    sessions = [session(n) for n in range(10)]
    load = closed(FakeServer(lambda _: 1.0), sessions, 1, num_requests=3, num_warmups=2)
    assert [record.is_warmup for record in load.records] == [True, True, False, False, False]


def test_a_duration_begins_after_the_warm_up() -> None:
    sessions = [session(n) for n in range(20)]
    load = closed(FakeServer(lambda _: 1.0), sessions, 1, seconds=3.0, num_warmups=4)
    assert sent(load) == [0, 1, 2, 3, 4, 5, 6]


def test_a_run_that_is_ended_keeps_what_it_has() -> None:
    load = Load(FakeServer(lambda _: 1.0), num_requests=100)

    async def interrupted() -> None:
        sessions = [session(n) for n in range(100)]
        task = asyncio.create_task(load.send(sessions, 2))
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.wait([task])

    run(interrupted())
    assert [record.is_ok for record in load.records] == [True] * 4 + [False] * 2
    assert {r.failure.kind for r in load.records if r.failure} == {"interrupted"}
