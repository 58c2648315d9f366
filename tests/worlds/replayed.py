"""Replays the step log of a world (a simulated replica with random requests and failures)."""

import json
from collections.abc import Iterable

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import Difference, LogReplay
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.step_log.log_entry import Entry


async def replay_differences(config: SchedulerConfig, entries: Iterable[Entry]) -> list[Difference]:
    """Replays log entries up to the first that differs. Returns its differing fields."""
    replay = LogReplay(Header("world", config))
    for entry in entries:
        if differences := await replay.replay_entry(Field(json.loads(json.dumps(entry)))):
            return differences
    return []
