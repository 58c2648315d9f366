"""Modes of an engine's pause, which differ in how unfinished requests are treated."""

from enum import Enum


class PauseMode(Enum):
    """vLLM's modes of /pause."""

    KEEP = "keep"
    """Unfinished requests continue after the pause."""
    ABORT = "abort"
    """Unfinished requests are aborted."""
    WAIT = "wait"
    """Running requests finish first. No other request is admitted."""
