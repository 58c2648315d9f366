"""The error of invalid messages from a scheduler."""

from collections.abc import Sequence


class WrongMessage(Exception):
    """A message from the scheduler contradicts itself or an earlier message. It
    ends the session.
    """


def require(condition: bool, wrong: str) -> None:
    """Raises WrongMessage with the message `wrong` if the condition is false."""
    if not condition:
        raise WrongMessage(wrong)


def require_numbers(name: str, values: Sequence[float], most: float) -> None:
    """Raises WrongMessage unless all values are numbers from 0 to `most`."""
    if not all(0 <= value <= most for value in values):
        raise WrongMessage(f"{name} holds {max(values)} and {min(values)}")
