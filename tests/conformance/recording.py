"""Reads the recordings of vLLM's decisions, which README.md describes."""

import json
import lzma
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Record = dict[str, Any]

DIRECTORY = Path(__file__).parent / "recordings"
NUM_RECORDINGS = {
    "basic": 53,
    "pooling": 5,
    "lora": 12,
    "session": 23,
    "connector": 45,
    "grammar": 15,
    "encoder": 25,
    "control": 27,
    "groups": 39,
    "mixed": 90,
    "events": 14,
}
"""Maps each family of recordings to its number of files."""
_NAME = re.compile(rb'\{"name": ?"(\w+)"')


@dataclass(frozen=True)
class Recording:
    """A scenario and vLLM's decisions in it. The JSON is parsed only when it is first used."""

    name: str
    _line: bytes

    def __str__(self) -> str:
        return self.name

    @property
    def scenario(self) -> Record:
        """The scenario's configuration and events."""
        return self._parsed["scenario"]

    @property
    def recorded(self) -> Record:
        """vLLM's decisions: the recorded fields of each step and request."""
        return self._parsed["recorded"]

    @cached_property
    def _parsed(self) -> dict[str, Record]:
        parsed: dict[str, Record] = json.loads(self._line)
        return parsed


def load_recordings(family: str) -> list[Recording]:
    """The recordings of a family, in file order."""
    packed = (DIRECTORY / f"{family}.jsonl.xz").read_bytes()
    lines = lzma.decompress(packed).splitlines()
    return [Recording(_name(line), line) for line in lines]


def _name(line: bytes) -> str:
    found = _NAME.match(line)
    assert found is not None, line[:80]
    return found[1].decode()


RECORDINGS = [recording for family in NUM_RECORDINGS for recording in load_recordings(family)]
