"""With the pool in the scheduler's process, Stepwell's decisions equal vLLM's in every recorded
field of every step, and a replay of the step log makes the same decisions.
"""

import json

import pytest

from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.table import ROWS
from services.cli.replay.what_if import what_if
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from tests.conformance.differences import assert_as_recorded
from tests.conformance.recording import RECORDINGS, Recording
from tests.scenarios.connector import connected
from tests.scenarios.run import ScenarioRun
from tests.scenarios.scenario import read_scenario


@pytest.mark.parametrize("recording", RECORDINGS, ids=str)
async def test_decisions_are_those_recorded_and_their_log_replays(recording: Recording) -> None:
    """A what-if replay with the log's own settings must also equal the run."""
    scenario = read_scenario(recording.scenario)
    config = scenario.config
    pool = InProcessPool(config)
    entries: list[Entry] = []
    connector = scenario.make_connector()
    scheduler = RecordingScheduler(config, pool, entries.append, connected(connector))
    record = await ScenarioRun(scenario, scheduler, pool.core, connector).run()
    assert_as_recorded(recording, record)
    header = Header("stand-in", config)
    replay = LogReplay(header)
    for entry in entries:
        told = json.loads(json.dumps(entry))
        assert told == entry
        assert await replay.replay_entry(Field(told)) == []
    if connector is not None:
        with pytest.raises(CommandError, match="log of a scheduler with a KV connector"):
            await what_if(replay.history, config)
        return
    if config.num_steps_in_flight > 2:
        return  # vLLM counts empty steps as in flight, but what-if replays do not plan them
    run = await what_if(replay.history, config)
    for row in ROWS:
        assert row.measure(run) == row.measure(replay.statistics), row.name
