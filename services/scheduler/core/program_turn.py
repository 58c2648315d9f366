"""Turns and pauses of programs, for traces and views."""

from dataclasses import dataclass


@dataclass(slots=True)
class ProgramTurn:
    """Set when a request is queued, by a policy that knows programs."""

    program: str
    """The client's id of the program, or a number with a # before it."""
    number: int
    """The number of the turn in its program, from 1."""
    num_before: int = 0
    """Number of turns that its conversation had before. A program has several conversations if its
    turns overlap.
    """
    began: float = 0.0
    """When the first turn of its conversation arrived."""
    tool: str = ""
    """The tool that ran before the turn."""
    pause_seconds: float | None = None
    """The time since the end of the turn before. None if no context of the program paused."""
    num_context_tokens: int = 0
    """Tokens of the context with which the turn begins."""
    traceparent_before: str = ""
    """The trace context of the turn before. Empty if it was not traced."""
    num_recomputed_tokens: int = 0
    """Tokens in whole blocks of the context that were not cached any more. Set at the end."""


@dataclass(frozen=True, slots=True)
class PausedProgram:
    """A program between two turns."""

    program: str
    """As in ProgramTurn."""
    tenant: bytes
    tool: str
    """The tool that runs. Empty if none is known."""
    seconds: float
    """The time since the end of the last turn."""
    num_turns: int
    num_tokens: int
    """Tokens of its context."""
    num_blocks: int
    """Blocks of its context that the pool still has."""
