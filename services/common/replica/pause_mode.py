"""Modes of an engine's pause, by what happens to requests that have not ended."""

from enum import Enum


class PauseMode(Enum):
    """vLLM's modes of /pause."""

    KEEP = "keep"
    """They go on after the pause."""
    ABORT = "abort"
    """They are aborted."""
    WAIT = "wait"
    """Running requests end first; no other is admitted."""
