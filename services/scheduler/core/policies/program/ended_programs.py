"""Statistics of ended programs, from which the remaining work of programs is estimated. A program
is the requests (turns) of one run of an agent. Programs whose first prompts begin with the same
tokens belong to one application.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from services.common.pool.block_hash import BlockHash
from services.common.recent import Recent
from services.scheduler.core.policies.programs import Program

_LEAST_ENDED = 5
"""An application's statistics are used only after this number of its programs has ended."""
_NUM_KEPT = 400
_MAX_APPLICATIONS = 1024
"""Limit on the number of applications whose statistics are stored."""
_FIRST_TURNS = 8.0
"""Expected number of turns of a program while too few programs have ended."""


@dataclass(slots=True)
class _Ended:
    """The numbers of turns and tokens of ended programs."""

    turns: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    presumed: dict[Program, tuple[int, int]] = field(default_factory=dict)
    """The turns and tokens of paused programs that have probably ended."""
    expected: dict[int, float] = field(default_factory=dict)
    """Results of `expected_tokens`. Emptied when the statistics change."""

    def __len__(self) -> int:
        return len(self.turns) + len(self.presumed)

    def add(self, program: Program) -> None:
        self.turns.append(program.num_turns)
        self.tokens.append(program.num_tokens)
        self.expected.clear()

    def presume(self, program: Program) -> None:
        self.presumed[program] = program.num_turns, program.num_tokens
        self.expected.clear()

    def returned(self, program: Program) -> None:
        if self.presumed.pop(program, None) is not None:
            self.expected.clear()

    def expected_tokens(self, num_turns: int) -> float:
        """The expected number of tokens of a program's turns after the first `num_turns` turns. If
        no ended program had more turns, half the mean number of tokens of a turn.
        """
        if (known := self.expected.get(num_turns)) is None:
            known = self.expected[num_turns] = self._expected_tokens(num_turns)
        return known

    def _expected_tokens(self, num_turns: int) -> float:
        presumed = self.presumed.values()
        all_turns = [*self.turns, *(turns for turns, _ in presumed)]
        more = [turns - num_turns for turns in all_turns if turns > num_turns]
        each = (sum(self.tokens) + sum(tokens for _, tokens in presumed)) / sum(all_turns)
        return each * (fmean(more) if more else 0.5)


class EndedPrograms:
    """Statistics of ended programs by application."""

    def __init__(self) -> None:
        self._of: Recent[BlockHash | None, _Ended] = Recent(_MAX_APPLICATIONS)
        """Maps applications to statistics."""
        self._first = _Ended()
        """Statistics of each application's first programs, used for applications that are new."""
        self._presumed = set[Program]()
        """Paused programs that count as ended until they return."""

    def add(self, program: Program) -> None:
        self.returned(program)
        own = self._own(program)
        own.add(program)
        if len(own) <= _LEAST_ENDED:
            self._first.add(program)

    def presume(self, program: Program) -> None:
        """Counts a paused program as ended until it returns, because it has probably ended."""
        if program in self._presumed:
            return
        self._presumed.add(program)
        own = self._own(program)
        own.presume(program)
        if len(own) <= _LEAST_ENDED:
            self._first.presume(program)

    def returned(self, program: Program) -> None:
        """Stops counting a program that was presumed to have ended."""
        if program in self._presumed:
            self._presumed.remove(program)
            self._first.returned(program)
            self._own(program).returned(program)

    def _own(self, program: Program) -> _Ended:
        own = self._of.get(program.application, _Ended())
        self._of[program.application] = own
        return own

    def expected_tokens(self, application: BlockHash | None, num_before: int) -> float:
        """The expected remaining work, in tokens, of a program that has had `num_before` turns. For
        a new application, uses the first programs of other applications.
        """
        own = self._of.get(application)
        for ended in (own, self._first):
            if ended is not None and len(ended) >= _LEAST_ENDED:
                return ended.expected_tokens(num_before)
        return max(1.0, _FIRST_TURNS - num_before)


def application_of(hashes: Sequence[BlockHash], block_size: int) -> BlockHash | None:
    """A program's application: the hash of the first 64 tokens (in whole blocks) of its first
    prompt.
    """
    return hashes[min(len(hashes), -(-64 // block_size)) - 1] if hashes else None
