"""The work of clients: programs, their turns, and the tokens of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash

_FIRST_OWN = 1 << 30
"""Tokens of applications are smaller than this number, tokens of programs are not."""
_APPLICATION_STRIDE = 1 << 22


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a program."""

    num_new_tokens: int
    """Number of prompt tokens after the context: what the user or a tool adds."""
    num_output_tokens: int
    pause_seconds: float = 0.0
    """Time from the end of the turn before, and of its subagents, to this request: the time of a
    tool or of a person.
    """
    num_kept_tokens: int | None = None
    """The length of the context that the client keeps of the earlier turns (compaction). All other
    tokens after the application's are new. None means that the whole context is kept.
    """
    subagents: tuple["Program", ...] = ()
    """Programs that begin when this turn ends. The next turn begins after all of them end."""
    runs: tuple[tuple[int, int], ...] | None = None
    """The whole prompt, for traces that say which blocks are equal: pairs of a first token and a
    number of consecutive tokens. None means that the prompt continues the program's context.
    """


@dataclass(frozen=True, slots=True)
class Program:
    """A client's work: turns. A turn begins after the end of the turn before."""

    number: int
    """Different programs have different tokens after the application's."""
    arrival_seconds: float
    turns: tuple[Turn, ...]
    application: int = 0
    num_shared_tokens: int = 0
    """Number of first tokens of all prompts that all programs of the application share."""
    tenant: str = ""
    priority: int = 0
    session_id: str = ""


@dataclass(slots=True)
class Context:
    """The tokens of a program so far. Token ids are a function of application, program and
    position, so that equal prefixes are equal tokens, and others differ.
    """

    program: Program
    number: int
    """Distinguishes the tokens after the application's. It changes with a compaction."""
    num_tokens: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    """The hashes of full blocks of the context that are known."""

    @property
    def next_token(self) -> int:
        """The token at position 0, if this position belonged to the program. The token at any other
        own position is greater by the position.
        """
        return _FIRST_OWN + self.number

    def prompt(self) -> list[int]:
        shared = min(self.program.num_shared_tokens, self.num_tokens)
        application = self.program.application % 255 * _APPLICATION_STRIDE
        tokens = list(range(application, application + shared))
        tokens.extend(range(self.next_token + shared, self.next_token + self.num_tokens))
        return tokens


def tokens_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    tokens: list[int] = []
    for first, length in runs:
        tokens.extend(range(first, first + length))
    return tokens


def num_requests(program: Program) -> int:
    """The number of turns of a program and its subagents."""
    return len(program.turns) + sum(
        num_requests(child) for turn in program.turns for child in turn.subagents
    )
