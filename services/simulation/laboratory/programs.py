"""Programs, which are the work of simulated clients: their turns (requests), and the tokens of the
prompts. All programs of an application begin with the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash

_FIRST_OWN = 1 << 30
"""Tokens of applications are smaller than this number. Tokens of programs are not."""
_APPLICATIONS = 1 << 31
"""Block hashes contain the number of the block's owner. Applications have numbers from this number
on, programs have smaller numbers.
"""
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a program."""

    num_new_tokens: int
    """Number of prompt tokens that the user or a tool adds to the program's earlier tokens."""
    num_output_tokens: int
    pause_seconds: float = 0.0
    """Time from the end of the previous turn and its subagents to this request. In this time a tool
    runs or a person reads.
    """
    num_kept_tokens: int | None = None
    """The number of tokens that a compaction (a summary of the earlier tokens) leaves: the tokens
    that the application shares, then new tokens. None means that all earlier tokens remain.
    """
    subagents: tuple["Program", ...] = ()
    """Programs that begin when this turn ends. The next turn begins after all of them end."""
    tool: str = ""
    """The name of the tool that runs before this turn."""
    runs: tuple[tuple[int, int], ...] | None = None
    """The whole prompt as pairs of a first token and a number of consecutive tokens, for traces
    that specify which blocks are equal. None means that the prompt continues the program's tokens.
    """


@dataclass(frozen=True, slots=True)
class Program:
    """A client's work, which consists of turns. A turn begins after the previous turn has ended."""

    number: int
    """Identifies the program, whose tokens differ from the tokens of all other programs."""
    arrival_seconds: float
    turns: tuple[Turn, ...]
    application: int = 0
    num_shared_tokens: int = 0
    """Number of first prompt tokens that all programs of the application have in common."""
    tenant: str = ""
    priority: int = 0
    session_id: str = ""


@dataclass(slots=True)
class Context:
    """The tokens of a program so far: first the application's token, once for each shared token,
    then only the program's own token. Therefore two blocks at the same position are equal if and
    only if they have the same owner (an application or a program).
    """

    program: Program
    number: int
    """Identifies the tokens after the application's tokens. A compaction changes it."""
    num_tokens: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    """The known hashes of the context's full blocks."""

    @property
    def own_token(self) -> int:
        """The token that is repeated after the application's tokens."""
        return _FIRST_OWN + self.number

    def prompt(self) -> list[int]:
        shared = min(self.program.num_shared_tokens, self.num_tokens)
        tokens = [self.program.application] * shared
        tokens += [self.own_token] * (self.num_tokens - shared)
        return tokens

    def hash_full_blocks(self, block_size: int) -> None:
        """Appends the missing hashes. A block's hash consists of the block's owner and position. It
        is cheaper than a digest of tokens, and also equal for equal prefixes.
        """
        begin, end = len(self.hashes), self.num_tokens // block_size
        shared = min(self.program.num_shared_tokens // block_size, end)
        self.hashes += _hashes(_APPLICATIONS + self.program.application, begin, shared)
        self.hashes += _hashes(self.number, max(begin, shared), end)


def _hashes(owner: int, begin: int, end: int) -> list[BlockHash]:
    """The hashes of an owner's blocks. The multiplication mixes the bits. Different pairs of owner
    and position, of 32 bits each, have different hashes.
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
