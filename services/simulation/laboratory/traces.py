"""Reads traces of requests in Mooncake's format, and in Dynamo's superset of it for agents.

Each line is a JSON object. `timestamp` is in milliseconds after the start of the trace,
`input_length` and `output_length` are in tokens, and `hash_ids` has an id for each block of 512
prompt tokens. Equal ids mean equal blocks. The superset adds:

    session_id        lines with the same id are a program's turns, which run one after the other
    delay             milliseconds since the end of the previous turn. In a first line without
                      timestamp, it replaces the timestamp
    tool_wait_ms      milliseconds that a tool takes in addition to `delay`
    request_id        the name of a line
    wait_for          in the first line of a session: the name of an earlier line, in a list. The
                      session begins as a subagent when that line's turn ends. The next turn of that
                      line's session begins when the subagent has ended
    prefix_reset      the prompt does not continue the session's earlier tokens

Without `hash_ids`, a prompt is its session's earlier tokens and `input_length` new tokens. With
`hash_ids`, a prompt does not contain earlier answers, because no id stands for an answer.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.errors import InvalidArgument
from services.simulation.laboratory.programs import Program, Turn

BLOCK_TOKENS = 512
_MAX_IDS = 1 << 21
"""Ids are taken modulo this number, so that tokens are below 2**30."""


@dataclass(slots=True)
class _Session:
    number: int
    arrival_seconds: float
    parent: tuple[str, int] | None = None
    """The session and the index of the turn after which this session begins as a subagent."""
    turns: list[Turn] = field(default_factory=list)
    subagents: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


def read_trace(lines: Iterable[str]) -> list[Program]:
    """Returns the programs of a trace in order of arrival. Raises InvalidArgument."""
    sessions: dict[str, _Session] = {}
    named: dict[str, tuple[str, int]] = {}
    for number, text in enumerate(lines, start=1):
        if text.strip():
            _add(_Line(number, text), sessions, named)
    for name, session in sessions.items():
        if session.parent is not None:
            parent, index = session.parent
            sessions[parent].subagents[index].append(name)
    programs = [
        _program(name, sessions) for name, session in sessions.items() if session.parent is None
    ]
    programs.sort(key=lambda program: program.arrival_seconds)
    first = programs[0].arrival_seconds if programs else 0.0
    return [replace(one, arrival_seconds=one.arrival_seconds - first) for one in programs]


def _add(line: "_Line", sessions: dict[str, _Session], named: dict[str, tuple[str, int]]) -> None:
    name = str(line.values.get("session_id", f"line {line.number}"))
    delay = line.number_of("delay", 0.0)
    pause = (delay + line.number_of("tool_wait_ms", 0.0)) / 1000
    session = sessions.get(name)
    if session is None:
        arrival = line.number_of("timestamp", delay) / 1000
        session = sessions[name] = _Session(len(sessions) + 1, arrival)
        waits = line.values.get("wait_for") or []
        if waits:
            earlier = str(waits[0]) if isinstance(waits, list) else None
            if earlier not in named:
                raise line.wrong("wait_for", "must name an earlier line, in a list")
            session.parent = named[earlier]
    session.turns.append(line.turn(pause))
    if "request_id" in line.values:
        named[str(line.values["request_id"])] = name, len(session.turns) - 1


def _program(name: str, sessions: Mapping[str, _Session]) -> Program:
    session = sessions[name]
    turns = [
        replace(turn, subagents=tuple(_program(one, sessions) for one in session.subagents[index]))
        if session.subagents[index]
        else turn
        for index, turn in enumerate(session.turns)
    ]
    return Program(session.number, session.arrival_seconds, tuple(turns), session_id=name)


class _Line:
    def __init__(self, number: int, text: str) -> None:
        self.number = number
        try:
            self.values: dict[str, Any] = json.loads(text)
        except ValueError:
            raise InvalidArgument(f"line {number} of the trace is not JSON") from None
        if not isinstance(self.values, dict):
            raise InvalidArgument(f"line {number} of the trace is not an object")

    def wrong(self, name: str, complaint: str) -> InvalidArgument:
        return InvalidArgument(f"line {self.number} of the trace: {name} {complaint}")

    def number_of(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"must be a number of at least 0, not {value!r}")
        if not 0 <= value < math.inf:
            raise self.wrong(name, f"must be a number of at least 0, not {value!r}")
        return float(value)

    def length(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, f"must be a whole number of at least 1, not {value!r}")
        return value

    def turn(self, pause_seconds: float) -> Turn:
        num_input, num_output = self.length("input_length"), self.length("output_length")
        hash_ids = self.values.get("hash_ids")
        kept = 0 if self.values.get("prefix_reset") else None
        if hash_ids is None:
            return Turn(num_input, num_output, pause_seconds, kept)
        if not isinstance(hash_ids, list) or not all(isinstance(one, int) for one in hash_ids):
            raise self.wrong("hash_ids", "must be a list of whole numbers")
        if len(hash_ids) != -(-num_input // BLOCK_TOKENS):
            raise self.wrong(
                "hash_ids",
                f"must have one id for each {BLOCK_TOKENS} of the {num_input} input tokens",
            )
        return Turn(num_input, num_output, pause_seconds, runs=tuple(_runs(hash_ids, num_input)))


def _runs(hash_ids: Iterable[int], num_tokens: int) -> Iterator[tuple[int, int]]:
    for hash_id in hash_ids:
        length = min(BLOCK_TOKENS, num_tokens)
        num_tokens -= length
        yield hash_id % _MAX_IDS * BLOCK_TOKENS, length
