"""Runs one random world (a simulated replica) and replays its step log."""

from collections import Counter

from tests.cli.virtual_time import run
from tests.worlds.generator import make_world
from tests.worlds.life import Life
from tests.worlds.replayed import replay_differences


def live_world(number: int, happened: Counter[str]) -> None:
    """Runs the world `number`. Raises AssertionError if a check fails, or the engine's error."""
    world = make_world(number)
    happened.update(world.families)

    async def live() -> None:
        life = Life(world, happened)
        await life.live()
        assert await replay_differences(world.config, life.entries) == []

    run(live())
