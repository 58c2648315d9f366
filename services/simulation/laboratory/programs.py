"""The work of clients: programs, their turns, and the tokens of their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash

_FIRST_OWN = 1 << 30
"""Tokens of applications are smaller than this number, tokens of programs are not."""
_APPLICATIONS = 1 << 31
"""Owners of blocks from this number on are applications, smaller ones are programs."""
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


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
    tool: str = ""
    """The name of the tool that runs before this turn."""
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
    """The tokens of a program so far. All tokens of an application are equal, and all of a program
    after them. Block hashes are chained, so prefixes are equal if and only if they have the same
    owners.
    """

    program: Program
    number: int
    """Distinguishes the tokens after the application's. It changes with a compaction."""
    num_tokens: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    """The hashes of full blocks of the context that are known."""

    @property
    def own_token(self) -> int:
        """Every token after the application's."""
        return _FIRST_OWN + self.number

    def prompt(self) -> list[int]:
        shared = min(self.program.num_shared_tokens, self.num_tokens)
        tokens = [self.program.application] * shared
        tokens += [self.own_token] * (self.num_tokens - shared)
        return tokens

    def hash_full_blocks(self, block_size: int) -> None:
        """Completes the hashes. A block's hash consists of its owner and its position, which is
        cheaper to compute than a digest of tokens, and is equal for equal prefixes, too.
        """
        begin, end = len(self.hashes), self.num_tokens // block_size
        shared = min(self.program.num_shared_tokens // block_size, end)
        self.hashes += _hashes(_APPLICATIONS + self.program.application, begin, shared)
        self.hashes += _hashes(self.number, max(begin, shared), end)


def _hashes(owner: int, begin: int, end: int) -> list[BlockHash]:
    """The hashes of an owner's blocks. The multiplication only mixes the bits: different owners and
    positions, of 32 bits each, have different hashes.
    """
    first = owner << 32
    return [
        BlockHash((block * _HASH_MULTIPLIER % (1 << 64)).to_bytes(8, "big"))
        for block in range(first + begin, first + end)
    ]


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
