"""Turns and pauses of programs, for traces and views. A program is the series of requests (turns)
of one run of an agent. In a pause between two turns, the agent executes a tool, and the program's
context (the KV blocks that the last turn has left in the pool) may stay cached.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ProgramTurn:
    """A turn of a program. Created by policies that group requests into programs."""

    program: str
    """The id that the client gave the program, or # and a number."""
    number: int
    """The number of the turn in its program, from 1."""
    num_before: int = 0
    """Number of earlier turns of this turn's conversation. A program has several conversations if
    its turns overlap.
    """
    began: float = 0.0
    """The time at which the conversation's first turn arrived."""
    arrived: float = 0.0
    """The time at which this turn arrived."""
    tool: str = ""
    """The tool that ran before the turn."""
    pause_seconds: float | None = None
    """The time from the end of the previous turn to this turn. None if no context is continued."""
    num_context_tokens: int = 0
    """Number of tokens of the context that the turn continues."""
    traceparent_before: str = ""
    """The `traceparent` of the previous turn. Empty if that turn was not traced."""
    num_recomputed_tokens: int = 0
    """Number of the context's tokens, in full blocks, that were evicted and computed again."""


@dataclass(frozen=True, slots=True)
class PausedProgram:
    """A program between two turns."""

    program: str
    """The id that the client gave the program, or # and a number."""
    tenant: bytes
    tool: str
    """The tool that runs during the pause. Empty if unknown."""
    seconds: float
    """The time since the end of the last turn."""
    num_turns: int
    num_tokens: int
    """Number of tokens of the program's context."""
    num_blocks: int
    """Number of blocks of the context that are still cached."""
