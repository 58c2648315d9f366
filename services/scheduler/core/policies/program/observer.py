"""What is told to metrics about programs."""

from enum import Enum


class RecomputationCause(Enum):
    """Why tokens of a program were computed again."""

    EVICTED = "evicted"
    """Other requests took blocks of the context in the pause."""
    PREEMPTED = "preempted"
    """The turn was preempted."""
    LOST = "lost"
    """Pool or workers were lost in the pause or in the turn."""


class ProgramObserver:
    """Is told what happens to programs. The methods do nothing here."""

    def began(self, *, is_named: bool) -> None:
        """A program began. `is_named` is whether the client named it."""

    def returned(self, tool: str, pause_seconds: float) -> None:
        """The next turn of a program arrived after a pause."""

    def ended(self, seconds: float, num_turns: int) -> None:
        """A program ended, or is presumed to have ended at the end of its last turn."""

    def taken(self, num_blocks: int, *, waits: bool) -> None:
        """A context lost blocks. `waits` is whether its next turn has arrived."""

    def recomputed(self, num_tokens: int, cause: RecomputationCause) -> None:
        """A turn had to compute tokens again. The number may be 0."""
