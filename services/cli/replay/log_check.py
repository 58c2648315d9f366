"""Replays a step log in memory."""

import json
from collections.abc import Coroutine
from typing import Any

from services.cli.replay.fields import Field, FieldError
from services.cli.replay.log_file import read_header
from services.cli.replay.log_replay import LogReplay


def log_differences(content: bytes) -> list[str]:
    """The differences of the first entry whose replay differs, or why the log cannot be replayed.
    The log has whole lines, and may have been cut off after any of them.
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
    """Runs a replay, which never waits, without an event loop."""
    try:
        replay.send(None)
    except StopIteration as end:
        found: list[str] = end.value
        return found
    raise AssertionError("a replay waits")
