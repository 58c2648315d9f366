"""What is told to metrics about programs."""


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

    def recomputed(self, num_tokens: int) -> None:
        """A turn had to compute tokens of its context again."""
