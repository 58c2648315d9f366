"""Runs one random world (a simulated replica) and replays its step log."""

import json
from collections import Counter
from collections.abc import Iterable

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import Difference, LogReplay
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.step_log.log_entry import Entry
from tests.cli.virtual_time import run
from tests.worlds.generator import make_world
from tests.worlds.life import Life


def live_world(number: int, happened: Counter[str]) -> None:
    """Runs the world `number`. Raises AssertionError if a check fails, or the engine's error."""
    world = make_world(number)
    happened.update(world.families)

    async def live() -> None:
        life = Life(world, happened)
        await life.live()
        assert await _replay_differences(world.config, life.entries) == []

    run(live())


async def _replay_differences(
    config: SchedulerConfig, entries: Iterable[Entry]
) -> list[Difference]:
    """Replays log entries up to the first that differs. Returns its differing fields."""
    replay = LogReplay(Header("world", config))
    for entry in entries:
        if differences := await replay.replay_entry(Field(json.loads(json.dumps(entry)))):
            return differences
    return []
