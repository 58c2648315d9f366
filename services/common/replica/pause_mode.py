"""Modes in which an operator pauses a replica. They differ in what happens to its requests."""

from enum import Enum


class PauseMode(Enum):
    """vLLM's modes of /pause."""

    KEEP = "keep"
    """Unfinished requests continue after the pause."""
    ABORT = "abort"
    """Unfinished requests are aborted."""
    WAIT = "wait"
    """Running requests finish first. No other request is admitted."""
