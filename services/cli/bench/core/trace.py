"""Traces of requests in Mooncake's format: arrival times, lengths, and shared prompt blocks.

Each line is a JSON object. `timestamp` is in milliseconds after the start of the trace.
`input_length` and `output_length` are in tokens. `hash_ids` has one id for each block of 512 prompt
tokens. The last block may be partial. Equal ids mean equal blocks after equal prefixes (R. Qin et
al., "Mooncake: Trading More Storage for Less Computation", FAST 2025, and its published traces).
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.cli.bench.core.session import Message, Session, Turn
from services.cli.bench.core.vocabulary import Vocabulary

BLOCK_TOKENS = 512
_CACHED_BLOCKS = 4096


class TraceError(ValueError):
    """An invalid line of a trace. The message names the line and the field."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace. Lengths are in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(lines: Iterable[str]) -> list[TraceLine]:
    """Reads the nonempty lines of a file and sorts them by timestamp. Raises TraceError."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    return sorted((_line(number, line) for number, line in numbered), key=lambda r: r.timestamp)


def _line(number: int, text: str) -> TraceLine:
    try:
        value = json.loads(text)
    except ValueError:
        raise TraceError(f"line {number} is not JSON") from None
    if not isinstance(value, dict):
        raise TraceError(f"line {number} is not an object")
    hash_ids = value.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(map(_is_whole, hash_ids)):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers")
    line = TraceLine(
        timestamp=_number(number, value, "timestamp"),
        input_length=_length(number, value, "input_length"),
        output_length=_length(number, value, "output_length"),
        hash_ids=tuple(hash_ids),
    )
    num_blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise TraceError(
            f"line {number}: input_length {line.input_length} has {num_blocks} blocks of "
            f"{BLOCK_TOKENS} tokens, but hash_ids has {len(hash_ids)}"
        )
    return line


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(line: int, value: dict[str, Any], name: str) -> float:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
        raise TraceError(f"line {line}: {name} must be a number of at least 0, not {number!r}")
    return number


def _length(line: int, value: dict[str, Any], name: str) -> int:
    number: Any = value.get(name)
    if not _is_whole(number) or number < 1:
        raise TraceError(f"line {line}: {name} must be a whole number of at least 1")
    return int(number)


class TraceLoad:
    """Yields the sessions of a trace in the order of arrival. Each session has one turn.
    `time_scale` multiplies arrival times. `token_scale` multiplies all lengths, also of blocks.
    The text of a block is a function of the seed and the block's id.
    """

    def __init__(
        self,
        lines: Sequence[TraceLine],
        vocabulary: Vocabulary,
        *,
        time_scale: float,
        token_scale: float,
        seed: int,
    ) -> None:
        self._lines = lines
        self._vocabulary = vocabulary
        self._time_scale = time_scale
        self._token_scale = token_scale
        self._block_tokens = max(1, round(BLOCK_TOKENS * token_scale))
        self._seed = seed
        self._block_text = lru_cache(_CACHED_BLOCKS)(self._make_block_text)

    def __iter__(self) -> Iterator[Session]:
        first = self._lines[0].timestamp if self._lines else 0.0
        for number, line in enumerate(self._lines):
            turn = Turn((Message("user", self._prompt(line)),), self._scaled(line.output_length))
            arrival = (line.timestamp - first) / 1000 * self._time_scale
            yield Session(number, (turn,), arrival)

    def _prompt(self, line: TraceLine) -> str:
        *whole, last = line.hash_ids
        texts = [self._block_text(hash_id, self._block_tokens) for hash_id in whole]
        rest = self._scaled(line.input_length - len(whole) * BLOCK_TOKENS)
        return " ".join([*texts, self._block_text(last, rest)])

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._token_scale))

    def _make_block_text(self, hash_id: int, num_tokens: int) -> str:
        """Random text of a block. Of two blocks with the same id, the shorter is a prefix."""
        return self._vocabulary.text(random.Random(f"{self._seed}/block/{hash_id}"), num_tokens)
