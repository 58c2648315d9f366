"""In each step, Stepwell's KV events report the same blocks as vLLM's."""

import pytest

from tests.conformance.differences import FIELDS, differences
from tests.conformance.recorded_events import EventfulRun
from tests.conformance.recording import Recording, load_recordings
from tests.scenarios.scenario import read_scenario


@pytest.mark.parametrize("recording", load_recordings("events"), ids=str)
async def test_events_are_those_recorded(recording: Recording) -> None:
    ours = await EventfulRun(read_scenario(recording.scenario)).run()
    fields = [*FIELDS, "stored", "removed", "cleared"]
    assert differences(recording.recorded, ours, fields) == []


def test_the_recordings_have_events_of_every_kind() -> None:
    steps = [step for one in load_recordings("events") for step in one.recorded["steps"]]
    stored = [block for step in steps for block in step.get("stored", ())]
    assert any(step.get("removed") for step in steps)
    assert any(step.get("cleared") for step in steps)
    assert len({group for group, *_ in stored}) > 2
    keys = {tuple(keys or ()) for *_, keys in stored}
    assert {len(one) for one in keys} == {0, 1, 2}
