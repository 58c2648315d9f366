"""What ends a command: one sentence for people, and an exit status."""


class CommandError(Exception):
    """The sentence goes to standard error as `stepwell <command>: <sentence>`."""

    def __init__(self, sentence: str, *, exit_status: int = 1) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_status = exit_status
