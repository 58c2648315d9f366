"""Modes in which an operator pauses a replica."""

from enum import Enum


class PauseMode(Enum):
    """vLLM's modes of /pause."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"
    """Running requests finish first. No other request is admitted."""
