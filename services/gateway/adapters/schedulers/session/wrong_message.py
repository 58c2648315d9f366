"""The error of invalid messages from a scheduler."""


class WrongMessage(Exception):
    """A message from the scheduler contradicts itself or an earlier message."""


def require(condition: bool, wrong: str) -> None:
    """Raises WrongMessage with the message `wrong` if the condition is false."""
    if not condition:
        raise WrongMessage(wrong)
