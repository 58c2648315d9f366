"""Requests move to other replicas if a replica cannot run steps, hangs, or serves another model."""

import asyncio
from pathlib import Path

import pytest

from services.common.pool.block_hash import unpack_token_ids
from services.common.request.tokenizer_files import tokenizer_fingerprint
from services.common.rpc.protocol import OtherProtocol
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import PROMPT, Stream, expected


def not_ready(scheduler: FakeScheduler) -> None:
    scheduler.permits = 0
    scheduler.set_state(ready=False, reason="the pool is away")


def ready(scheduler: FakeScheduler) -> None:
    scheduler.run_freely()
    scheduler.set_state(ready=True)


async def replicas(served: Serving) -> list[dict]:
    found: list[dict] = (await served.http.get("/status")).json()["replicas"]
    return found


async def test_a_replica_that_cannot_run_steps_gets_no_requests(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    async with serving(model, first, second) as served:
        not_ready(first)
        await until(lambda: served.gateway.membership.num_ready == 1)
        for _ in range(8):
            answer = await served.http.post("/v1/completions", json={"prompt": "the"})
            assert answer.status_code == 200
        assert (len(first.adds), len(second.adds)) == (0, 8)
        health = (await served.http.get("/health")).json()
        assert health["not_ready"] == {first.address: "the pool is away"}
        assert [(r["ready"], r["reason"]) for r in await replicas(served)] == [
            (False, "the pool is away"),
            (True, ""),
        ]
        not_ready(second)
        await until(lambda: served.gateway.membership.num_ready == 0)
        refused = await served.http.get("/health")
        assert refused.status_code == 503
        assert "the pool is away" in refused.json()["reason"]


async def test_a_scheduler_of_another_protocol_gets_no_requests_and_is_named(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    first.refusal = OtherProtocol("this scheduler has version 9.0 (protocol 9)")
    async with serving(model, first, second, num_ready=1) as served:
        for _ in range(4):
            answer = await served.http.post("/v1/completions", json={"prompt": "the"})
            assert answer.status_code == 200
        health = (await served.http.get("/health")).json()
        assert health["not_ready"] == {first.address: "this scheduler has version 9.0 (protocol 9)"}
        await asyncio.sleep(1)  # the gateway opens sessions again, but logs no further refusal
        said = [line for line in caplog.messages if "protocol 9" in line]
        assert said == [
            f"no session with scheduler {first.address} can be opened: this scheduler has version "
            "9.0 (protocol 9)"
        ]
        first.refusal = None
        await until(lambda: served.gateway.membership.num_ready == 2)


async def test_streams_leave_a_replica_that_cannot_run_steps(model: Path) -> None:
    first, second = FakeScheduler(permits=0), FakeScheduler(permits=0)
    async with serving(model, first, second, migrate_after_seconds=0.2) as served:
        streams = [Stream(served) for _ in range(4)]
        await until(lambda: first.num_running == second.num_running == 2)
        first.allow(4)
        await until(lambda: sum(len(stream.token_ids) for stream in streams) == 8)
        not_ready(first)
        await until(lambda: second.num_running == 4)
        assert first.num_running == 0
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [stream.token_ids for stream in streams] == [expected(30)] * 4
        moved = [unpack_token_ids(add.output_token_ids) for add in second.adds[2:]]
        assert moved == [expected(4)] * 2


async def test_streams_stay_for_a_short_absence_and_with_an_only_replica(model: Path) -> None:
    first = FakeScheduler(permits=3)
    async with serving(model, first, migrate_after_seconds=0.05) as served:
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 3)
        not_ready(first)
        await until(lambda: served.gateway.membership.num_ready == 0)
        replica = served.gateway.membership.replicas[0]
        await until(lambda: (replica.seconds_stalled() or 0) > 0.2)
        assert first.num_running == 1
        ready(first)
        await stream.task
        assert stream.token_ids == expected(30)
        assert len(first.adds) == 1


async def test_streams_leave_once_another_replica_is_ready(model: Path) -> None:
    first, second = FakeScheduler(permits=3), FakeScheduler()
    async with serving(model, first, second, migrate_after_seconds=0.05) as served:
        not_ready(second)
        await until(lambda: served.gateway.membership.num_ready == 1)
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 3)
        not_ready(first)
        await until(lambda: (served.gateway.membership.replicas[0].seconds_stalled() or 0) > 0.1)
        ready(second)
        await stream.task
        assert stream.token_ids == expected(30)


async def test_a_draining_replica_keeps_its_streams(model: Path) -> None:
    first, second = FakeScheduler(permits=0), FakeScheduler(permits=0)
    async with serving(model, first, second, migrate_after_seconds=0.05) as served:
        streams = [Stream(served) for _ in range(2)]
        await until(lambda: first.num_running == second.num_running == 1)
        first.set_state(ready=False, reason="the scheduler is draining", draining=True)
        await until(lambda: served.gateway.membership.num_ready == 1)
        third = Stream(served)
        await until(lambda: second.num_running == 2)
        first.run_freely()
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in (*streams, third)))
        assert len(first.adds) == 1


async def test_a_silent_session_is_ended_and_its_requests_go_elsewhere(model: Path) -> None:
    first, second = FakeScheduler(permits=0), FakeScheduler(permits=0)
    async with serving(model, first, second, session_timeout_seconds=0.8) as served:
        streams = [Stream(served) for _ in range(4)]
        await until(lambda: first.num_running == second.num_running == 2)
        first.hang()
        await until(lambda: len(second.adds) == 4)
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [stream.token_ids for stream in streams] == [expected(30)] * 4
        reason = served.gateway.membership.replicas[0].reason
        assert reason == "the scheduler sent no message within 0.8 s and hangs"


async def test_a_session_without_requests_is_not_taken_for_hung(model: Path) -> None:
    scheduler = FakeScheduler(heartbeat_seconds=0.05)
    async with serving(model, scheduler, session_timeout_seconds=1.0) as served:
        loop = asyncio.get_running_loop()
        until_then = loop.time() + 2.0
        await until(lambda: loop.time() > until_then)
        assert served.scheduler.num_sessions == 1
        assert served.gateway.membership.num_ready == 1


async def test_requests_that_wait_are_sent_in_order_of_arrival(model: Path) -> None:
    """While no replica serves, new requests wait behind those that ran on the lost replica."""
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        streams = []
        for name in range(6):
            streams.append(Stream(served, {"request_id": f"r{name}"}))
            await until(lambda count=name + 1: scheduler.num_running == count)  # type: ignore[misc]
        await scheduler.die()
        await until(lambda: served.gateway.fleet.num_waiting == 6)
        for name in range(6, 12):
            streams.append(Stream(served, {"request_id": f"r{name}"}))
            await until(lambda count=name + 1: served.gateway.fleet.num_waiting == count)  # type: ignore[misc]
        scheduler.adds.clear()
        scheduler.run_freely()
        await scheduler.start()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [add.request_id for add in scheduler.adds] == [f"cmpl-r{n}" for n in range(12)]
        assert [stream.token_ids for stream in streams] == [expected(30)] * 12


async def test_losses_far_apart_have_the_whole_time_each(model: Path) -> None:
    """After a second loss, a request may again wait for the whole resubmit timeout."""
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler, resubmit_timeout_seconds=2.0) as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        streams = [Stream(served) for _ in range(3)]
        await until(lambda: scheduler.num_running == 3)
        await scheduler.die()
        await until(lambda: served.gateway.fleet.num_waiting == 3)
        await scheduler.start()
        await until(lambda: scheduler.num_running == 3)
        await until(lambda: loop.time() > began + 2.5)
        await scheduler.die()
        await until(lambda: served.gateway.fleet.num_waiting == 3)
        scheduler.run_freely()
        await scheduler.start()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [(s.error, s.token_ids) for s in streams] == [(None, expected(30))] * 3


async def test_losses_of_requests_that_only_waited_do_not_count(model: Path) -> None:
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        for _ in range(7):
            await until(lambda: scheduler.num_running == 1)
            scheduler.end_sessions()
            await until(lambda: scheduler.num_running == 0)
        scheduler.run_freely()
        await stream.task
        assert (stream.error, stream.token_ids) == (None, expected(30))


async def test_a_request_under_which_replicas_die_is_ended(model: Path) -> None:
    scheduler = FakeScheduler(tokens_per_step=0)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        for _ in range(6):
            await until(lambda: scheduler.num_running == 1)
            (inflight,) = served.gateway.membership.replicas[0].running.values()
            await until(lambda inflight=inflight: inflight.losses.computing)  # type: ignore[misc]
            scheduler.end_sessions()
            await until(lambda: scheduler.num_running == 0)
        await stream.task
        assert stream.error is not None
        assert stream.error["code"] == "replicas_lost"


async def test_new_requests_wait_for_a_replica_as_long_as_others(model: Path) -> None:
    scheduler = FakeScheduler()
    async with serving(model, scheduler) as served:
        await scheduler.die()
        await until(lambda: served.gateway.membership.num_ready == 0)
        answer = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": PROMPT}))
        await until(lambda: served.gateway.fleet.num_waiting == 1)
        await scheduler.start()
        assert (await answer).status_code == 200


async def test_a_draining_gateway_refuses_at_once_and_ends_what_waits(model: Path) -> None:
    scheduler = FakeScheduler()
    async with serving(model, scheduler, drain_seconds=0.5) as served:
        await scheduler.die()
        await until(lambda: served.gateway.membership.num_ready == 0)
        stream = Stream(served)
        await until(lambda: served.gateway.fleet.num_waiting == 1)
        drained = asyncio.create_task(served.gateway.drain())
        await until(lambda: not served.gateway.gate.is_open)
        refused = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert refused.status_code == 503
        await drained
        await stream.task
        assert stream.error is not None


async def test_a_replica_of_another_model_is_refused(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler(fingerprint=b"g" * 32)
    async with serving(model, first, second, num_ready=1) as served:
        await until(
            lambda: all(replica.is_connected for replica in served.gateway.membership.replicas)
        )
        good = next(r for r in served.gateway.membership.replicas if r.is_ready)
        (bad,) = (r for r in served.gateway.membership.replicas if not r.is_ready)
        assert "fingerprint" in bad.reason
        for _ in range(8):
            answer = await served.http.post("/v1/completions", json={"prompt": "the"})
            assert answer.status_code == 200
        fakes = {scheduler.address: scheduler for scheduler in (first, second)}
        assert (len(fakes[good.address].adds), len(fakes[bad.address].adds)) == (8, 0)
        assert bad.reason in (await served.http.get("/health")).json()["not_ready"][bad.address]
        statuses = {status["address"]: status for status in await replicas(served)}
        assert statuses[bad.address]["reason"] == bad.reason


async def test_a_replica_with_another_tokenizer_is_refused(model: Path) -> None:
    scheduler = FakeScheduler(tokenizer_fingerprint=b"t" * 32)
    async with serving(model, scheduler, num_ready=0) as served:
        await until(lambda: served.gateway.membership.replicas[0].is_connected)
        health = await served.http.get("/health")
        assert health.status_code == 503
        assert "tokenizer files" in health.json()["reason"]
        await scheduler.die()
        scheduler.tokenizer_fingerprint = tokenizer_fingerprint(model)
        await scheduler.start()
        await until(lambda: served.gateway.membership.num_ready == 1)


async def test_a_stream_never_goes_on_under_another_model(model: Path) -> None:
    first, second = FakeScheduler(permits=3), FakeScheduler(permits=0)
    async with serving(model, first, second) as served:
        await second.die()
        second.fingerprint = b"g" * 32
        await second.start()
        await until(lambda: "fingerprint" in served.gateway.membership.replicas[1].reason)
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 3)
        # The first replica crashes and restarts. The second replica gets no request.
        await first.die()
        await until(lambda: served.gateway.fleet.num_waiting == 1)
        first.run_freely()
        await first.start()
        await stream.task
        assert (stream.error, stream.token_ids) == (None, expected(30))
        assert second.adds == []


async def test_a_model_that_is_replaced_on_all_replicas_is_served(model: Path) -> None:
    """A request with output of the old model ends with an error. Others get the new model."""
    first, second = FakeScheduler(permits=3), FakeScheduler(permits=0)
    async with serving(model, first, second) as served:
        streams = [Stream(served) for _ in range(2)]
        await until(lambda: any(len(stream.token_ids) == 3 for stream in streams))
        for scheduler in (first, second):
            await scheduler.die()
        await until(lambda: served.gateway.fleet.num_waiting == 2)
        for scheduler in (first, second):
            scheduler.fingerprint = b"g" * 32
            scheduler.run_freely()
            await scheduler.start()
        await asyncio.gather(*(stream.task for stream in streams))
        begun, unbegun = sorted(streams, key=lambda stream: len(stream.token_ids))
        assert (begun.error or {})["code"] == "model_replaced"
        assert begun.token_ids == expected(3)
        assert (unbegun.error, unbegun.token_ids) == (None, expected(30))
        answer = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert answer.status_code == 200


async def test_a_replaced_model_does_not_wait_for_ever_for_the_old_one(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    async with serving(model, first, second, resubmit_timeout_seconds=0.4) as served:
        await first.die()
        await second.die()
        await until(lambda: served.gateway.membership.num_ready == 0)
        second.fingerprint = b"g" * 32
        await second.start()
        await until(lambda: served.gateway.membership.num_ready == 1)
        assert (await served.http.post("/v1/completions", json={"prompt": "the"})).is_success
        await first.start()
        await until(lambda: "fingerprint" in served.gateway.membership.replicas[0].reason)
        assert served.gateway.membership.num_ready == 1


async def test_requests_that_wait_for_a_first_replica_are_refused_when_the_gateway_ends(
    model: Path,
) -> None:
    nowhere = {"schedulers": ("127.0.0.1:1",), "num_ready": 0, "drain_seconds": 0.05}
    async with serving(model, **nowhere) as served:
        body = {"prompt": "hi", "max_tokens": 3}
        waiting = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await until(lambda: served.gateway.gate.inside)
        await served.gateway.drain()
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica_ready")
