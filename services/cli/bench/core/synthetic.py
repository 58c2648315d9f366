"""A synthetic load: random prompts with shared prefixes and several turns."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli.bench.core.lengths import Range
from services.cli.bench.core.session import Message, Session, Turn
from services.cli.bench.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Yields endless sessions. Lengths are in tokens. Each session begins with one of
    `num_prefixes` prefixes of `prefix_len` tokens, drawn at random. In the chat API the prefix is
    the system message. Each of the session's `turns` adds `input_len` tokens. The number of a
    session and the settings, which include the seed, determine the session's contents.
    """

    vocabulary: Vocabulary
    input_len: Range
    output_len: Range
    prefix_len: int
    num_prefixes: int
    turns: Range
    think_seconds: Range
    seed: int

    def __iter__(self) -> Iterator[Session]:
        return map(self.session, itertools.count())

    def session(self, number: int) -> Session:
        draw = random.Random(f"{self.seed}/session/{number}")
        prefix = self._prefix(draw)
        turns = [self._turn(draw, index, prefix) for index in range(self.turns.whole(draw))]
        return Session(number, turns)

    def _turn(self, draw: random.Random, index: int, prefix: tuple[Message, ...]) -> Turn:
        text = self.vocabulary.text(draw, self.input_len.whole(draw))
        return Turn(
            messages=(*(prefix if index == 0 else ()), Message("user", text)),
            output_len=self.output_len.whole(draw),
            think_seconds=self.think_seconds.number(draw) if index else 0.0,
        )

    def _prefix(self, draw: random.Random) -> tuple[Message, ...]:
        if not self.prefix_len:
            return ()
        chosen = draw.randrange(self.num_prefixes)
        own = random.Random(f"{self.seed}/prefix/{chosen}")
        return (Message("system", self.vocabulary.text(own, self.prefix_len)),)
