"""Replays a step log in memory."""

import json
from collections.abc import Coroutine
from typing import Any

from services.cli.replay.fields import Field, FieldError
from services.cli.replay.log_file import read_header
from services.cli.replay.log_replay import LogReplay


def log_differences(content: bytes) -> list[str]:
    """The differences in the first entry whose replay differs from the log, or only the reason why
    the log cannot be replayed. `content` must end with a whole line.
    """
    lines = content.splitlines()
    try:
        return _result(_differences(lines)) if lines else []
    except FieldError as error:
        return [f"the step log cannot be replayed: {error}"]


async def _differences(lines: list[bytes]) -> list[str]:
    replay = LogReplay(read_header(Field(json.loads(lines[0]))))
    for number, line in enumerate(lines[1:], start=2):
        if differences := await replay.replay_entry(Field(json.loads(line))):
            return [f"line {number} of the step log: {one}" for one in differences]
    return []


def _result(replay: Coroutine[Any, Any, list[str]]) -> list[str]:
    """Runs a replay without an event loop, since replays never wait."""
    try:
        replay.send(None)
    except StopIteration as end:
        found: list[str] = end.value
        return found
    raise AssertionError("a replay must not wait")
