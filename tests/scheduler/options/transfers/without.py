"""Tests of a scheduler after test_removed_option.py deleted the code of the option `transfers`."""

import httpx
import pytest

from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.common.errors import FailedPrecondition
from services.scheduler.adapters.workers.steps_in_flight import StepsInFlight
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.kv_transfer import KVRole
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import Gateway, serving_replica
from tests.scheduler.story import prompt


async def test_workers_with_a_tier_are_served_without_it(free_port: int) -> None:
    worker = FakeWorker()
    worker.description.num_tier_blocks = 8
    async with serving_replica(worker, metrics_address=f"127.0.0.1:{free_port}") as replica:
        gateway = Gateway(replica.stub)
        await gateway.open()
        for handle in (1, 2):
            await gateway.add(handle, prompt(9))
            await gateway.finish(handle)
        assert gateway.heard[1].tokens == gateway.heard[2].tokens != []
        assert gateway.heard[2].num_cached_tokens == 8
        await gateway.close()
        await replica.until_idle()
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{free_port}/metrics")).text
    assert "vllm:num_requests_running" in text
    assert "stepwell_kv_tier" not in text
    assert not any(request.tier_stores.block_ids for request in worker.steps)


def test_an_answer_about_loads_is_wrong() -> None:
    steps = StepsInFlight("a", Deadlines(1, 10))
    with pytest.raises(ValueError, match="has started no load from host memory"):
        steps.transfers.note("a", None)


def test_a_log_with_a_connector_is_not_replayed() -> None:
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=16,
        block_size=4,
        num_blocks=9,
        fingerprint=b"f" * 32,
        kv_role=KVRole.BOTH,
    )
    with pytest.raises(FailedPrecondition, match="a scheduler with a KV connector"):
        LogReplay(Header("model", config))
