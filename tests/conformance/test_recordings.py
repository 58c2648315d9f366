"""Stepwell's decisions equal vLLM's in every recorded field of every step, and a replay of the step
log makes the same decisions. In the runs the pool is a gRPC service, in the replays it is in the
scheduler's process.
"""

import asyncio
import json
from dataclasses import dataclass

import pytest
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.table import ROWS
from services.cli.replay.what_if import what_if
from services.common.pool.ids import PoolId
from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer
from services.common.telemetry.tracing import configure_tracing
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.servicer import KVPoolServicer
from services.kvpool.core.pool_host import PoolHost
from services.scheduler.adapters.pool.pool_client import PoolClient
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from tests.conformance.differences import FIELDS, assert_as_recorded, differences
from tests.conformance.recording import (
    DIRECTORY,
    NUM_RECORDINGS,
    RECORDINGS,
    Record,
    Recording,
    load_recordings,
)
from tests.scenarios.connector import connected
from tests.scenarios.run import ScenarioRun
from tests.scenarios.scenario import read_scenario


@dataclass(frozen=True)
class Run:
    """A run of a recording's scenario: the record of its decisions, and the step log."""

    recording: Recording
    config: SchedulerConfig
    record: Record
    entries: list[Entry]


@pytest.fixture(scope="module", params=RECORDINGS, ids=str)
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run(run_over_grpc(request.param))


async def run_over_grpc(recording: Recording) -> Run:
    story = read_scenario(recording.scenario)
    config = story.config
    feed, directory = EventFeed(), MemoryDirectory()
    host: PoolHost[kvpool_pb2.TransactResponse] = PoolHost(
        (directory, feed), lambda: 1, max_pools=1, max_blocks_per_pool=10_000
    )
    server = GrpcServer()
    servicer = KVPoolServicer(host, directory, feed, configure_tracing("kvpool", "", 1.0))
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, servicer, "stepwell.kvpool.v1.KVPool")
    channel = open_channel(await server.start("127.0.0.1:0"))
    client = PoolClient(channel, "recording", timeout_seconds=60)
    try:
        await client.open(config)
        connector = story.make_connector()
        entries: list[Entry] = []
        scheduler = RecordingScheduler(config, client, entries.append, connected(connector))
        pool = host.get(PoolId("recording")).pool
        record = await ScenarioRun(story, scheduler, pool, connector).run()
        return Run(recording, config, record, entries)
    finally:
        client.close()
        await channel.close()
        await server.drain(0)


def test_all_recordings_are_there() -> None:
    assert {family: len(load_recordings(family)) for family in NUM_RECORDINGS} == NUM_RECORDINGS
    files = DIRECTORY.iterdir()
    assert {file.name.removesuffix(".jsonl.xz") for file in files} == NUM_RECORDINGS.keys()


def test_decisions_are_those_recorded(run: Run) -> None:
    assert_as_recorded(run.recording, run.record)


async def test_the_step_log_replays(run: Run) -> None:
    """A what-if replay with the log's own settings must also equal the run."""
    config = run.config
    replay = LogReplay(Header("stand-in", config))
    for entry in run.entries:
        told = json.loads(json.dumps(entry))
        assert told == entry
        assert await replay.replay_entry(Field(told)) == []
    if config.kv_role:
        with pytest.raises(CommandError, match="log of a scheduler with a KV connector"):
            await what_if(replay.history, config)
        return
    if config.num_steps_in_flight > 2:
        return  # vLLM counts empty steps as in flight, but what-if replays do not plan them
    alike = await what_if(replay.history, config)
    for row in ROWS:
        assert row.measure(alike) == row.measure(replay.statistics), row.name


def test_a_changed_decision_shows() -> None:
    recorded = RECORDINGS[0].recorded
    changed = json.loads(json.dumps(recorded))
    changed["steps"][3]["free_sha"] = "0" * 12
    changed["requests"]["r000"]["num_preemptions"] += 1
    assert len(differences(recorded, changed, FIELDS)) == 2


def test_only_the_order_of_queues_by_priority_is_no_decision() -> None:
    recorded, changed = (
        {"steps": [{"step": 1, "waiting": w}], "requests": {}} for w in ("ab", "ba")
    )
    assert differences(recorded, changed, FIELDS, policy="priority") == []
    assert len(differences(recorded, changed, FIELDS)) == 1
    changed["steps"][0]["waiting"] = "bc"
    assert len(differences(recorded, changed, FIELDS, policy="priority")) == 1
