"""What a pause of an engine does with requests that have not ended."""

from enum import Enum


class PauseMode(Enum):
    """vLLM's modes of /pause."""

    KEEP = "keep"
    """They go on after the pause."""
    ABORT = "abort"
    """They are aborted."""
    WAIT = "wait"
    """Those that run end first; no other is admitted."""
