"""Turns and pauses of programs, for traces and views. A program is a series of requests, such as an
agent's. In a pause between two requests (turns), the agent executes a tool.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ProgramTurn:
    """A turn of a program. Set when its request is queued, by policies that know programs."""

    program: str
    """The client's id of the program, or a number with a # before it."""
    number: int
    """The number of the turn in its program, from 1."""
    num_before: int = 0
    """Number of earlier turns of the same conversation. A program has several conversations if its
    turns overlap.
    """
    began: float = 0.0
    """The time at which the conversation's first turn arrived."""
    tool: str = ""
    """The tool that ran before the turn."""
    pause_seconds: float | None = None
    """The time since the end of the previous turn. None if no paused context is continued."""
    num_context_tokens: int = 0
    """Number of tokens of the paused context that the turn continues."""
    traceparent_before: str = ""
    """The trace context of the previous turn. Empty if that turn was not traced."""
    num_recomputed_tokens: int = 0
    """Number of tokens in full blocks of the context that were not cached. Set at the end."""


@dataclass(frozen=True, slots=True)
class PausedProgram:
    """A program between two turns."""

    program: str
    """The client's id of the program, or a number with a # before it."""
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
