"""The route /activity returns the schedulers' reports of their steps."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.options.viewer.activity.feed import SAMPLE_SECONDS
from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving

BODY = {"prompt": "the", "max_tokens": 50}
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
SECOND = 1_000_000_000


def step(number: int, begun: int, done: int) -> scheduler_pb2.StepActivity:
    return scheduler_pb2.StepActivity(
        step=number,
        begun_unix_nanos=begun,
        done_unix_nanos=done,
        num_requests=2,
        num_prefill_tokens=30,
        num_decode_tokens=1,
        keys=[7, 8],
        num_tokens=[30, 1],
        wait_reason=scheduler_pb2.WAIT_REASON_NO_BLOCKS,
    )


async def activity(http: httpx.AsyncClient, query: str = "") -> dict[str, Any]:
    answer = await http.get(f"/activity{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_steps_and_blocks_are_as_the_scheduler_says(model: Path) -> None:
    blocks = common_pb2.BlockMap(
        blocks_per_cell=1, states=[1, 2, 3, 4], owners=[0, 0, 7, 8], num_held=1
    )
    fake = FakeScheduler(steps=[step(1, SECOND, 3 * SECOND)], blocks=blocks)
    async with serving(model, fake) as served:
        document = Documented((await served.http.get("/openapi.json")).json())
        answer = await served.http.get("/activity")
        document.check("/activity", answer)
        (replica,) = answer.json()["replicas"]
        assert (replica["address"], replica["ready"]) == (fake.address, True)
        assert replica["stats"]["num_steps"] == 7
        assert replica["blocks"]["states"] == "1234"
        assert replica["blocks"]["owners"] == [0, 0, 7, 8]
        (one,) = replica["steps"]
        assert (one["step"], one["seconds"], one["wait_reason"]) == (1, 2.0, "no_blocks")
        assert (one["keys"], one["num_tokens"]) == ([7, 8], [30, 1])


async def test_only_steps_that_are_new_to_the_caller_are_sent(model: Path) -> None:
    """If steps overlap, the time of a step begins at the end of the step before."""
    fake = FakeScheduler(steps=[step(1, SECOND, 3 * SECOND), step(2, 2 * SECOND, 4 * SECOND)])
    async with serving(model, fake) as served:
        (replica,) = (await activity(served.http, f"?after=1@{fake.address}"))["replicas"]
        assert [(one["step"], one["seconds"]) for one in replica["steps"]] == [(2, 1.0)]
        (replica,) = (await activity(served.http, f"?after=2@{fake.address}"))["replicas"]
        assert replica["steps"] == []
        # Step 99 ran in an earlier process of the scheduler.
        (replica,) = (await activity(served.http, f"?after=99@{fake.address}"))["replicas"]
        assert len(replica["steps"]) == 2


async def test_a_restarted_scheduler_reports_its_first_steps(model: Path) -> None:
    """The new process has already run more steps than the gateway had seen of the earlier one."""
    fake = FakeScheduler(steps=[step(1, SECOND, 3 * SECOND)])
    async with serving(model, fake) as served:
        assert len((await activity(served.http))["replicas"][0]["steps"]) == 1
        fake.incarnation = "2"
        fake.steps = [step(n, n * SECOND, (n + 1) * SECOND) for n in (1, 2, 3)]
        await asyncio.sleep(SAMPLE_SECONDS)
        (replica,) = (await activity(served.http))["replicas"]
        assert [one["step"] for one in replica["steps"]] == [1, 2, 3]


async def test_however_many_look_a_scheduler_is_asked_a_few_times_a_second(model: Path) -> None:
    fake = FakeScheduler()
    async with serving(model, fake) as served:
        loop = asyncio.get_running_loop()
        assert fake.looks == []
        began = loop.time()
        await asyncio.gather(*(activity(served.http) for _ in range(30)))
        assert 1 <= len(fake.looks) <= 1 + (loop.time() - began) / SAMPLE_SECONDS


async def test_one_replica_is_given_in_full_where_it_is_named(model: Path) -> None:
    one, other = FakeScheduler(steps=[step(1, 1, 2)]), FakeScheduler(steps=[step(1, 1, 2)])
    async with serving(model, one, other) as served:
        replicas = (await activity(served.http, f"?replica={other.address}"))["replicas"]
        assert [len(replica["steps"]) for replica in replicas] == [0, 1]
        assert all(replica["stats"] is not None for replica in replicas)


async def test_a_scheduler_that_hangs_is_reported(model: Path) -> None:
    fine, away = FakeScheduler(), FakeScheduler()
    async with serving(model, fine, away) as served:
        await away.die()
        replicas = (await activity(served.http))["replicas"]
        assert [replica["stats"] is None for replica in replicas] == [False, True]
        assert replicas[1]["reason"]
