"""`stepwell replay` on the recorded scenarios, and on step logs of them."""

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.inprocess_pool import InProcessPool
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.scenarios.run import ScenarioRun
from services.cli.replay.scenarios.scenario import read_scenario
from services.cli.replay.table import ROWS
from services.cli.replay.what_if import what_if
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from tests.conformance.differences import FIELDS, differences
from tests.conformance.recording import RECORDINGS, Recording


@pytest.mark.parametrize("recording", RECORDINGS[::6], ids=str)
def test_the_command_prints_the_record(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(recording.scenario, indent=1))
    assert main(["replay", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    recorded = recording.recorded
    assert differences(recorded, printed, FIELDS) == []
    assert (printed["status"], len(printed["steps"])) == (
        recorded["status"],
        len(recorded["steps"]),
    )


@pytest.mark.parametrize("recording", RECORDINGS, ids=str)
async def test_a_log_of_a_scenario_replays_and_without_a_change_nothing_changes(
    recording: Recording,
) -> None:
    scenario = read_scenario(recording.scenario)
    config = scenario.config
    pool = InProcessPool(config)
    entries: list[Entry] = []
    connector = scenario.make_connector()
    scheduler = RecordingScheduler(config, pool, entries.append, connector)
    await ScenarioRun(scenario, scheduler, pool.core, connector).run()
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
        return  # vLLM counts empty steps among those in flight, and our engine does not plan them
    run = await what_if(replay.history, config)
    for row in ROWS:
        assert row.measure(run) == row.measure(replay.statistics), row.name
