"""The error of messages that no scheduler in order sends."""

from collections.abc import Sequence


class WrongMessage(Exception):
    """A message of the scheduler contradicts what it was asked, or itself. It ends the session."""


def require(condition: bool, wrong: str) -> None:
    """Raises WrongMessage unless the condition holds; `wrong` says what the message has."""
    if not condition:
        raise WrongMessage(wrong)


def require_numbers(name: str, values: Sequence[float], most: float) -> None:
    """Raises WrongMessage unless all are numbers from 0 to `most`."""
    if not all(0 <= value <= most for value in values):
        raise WrongMessage(f"{name} holds {max(values)} and {min(values)}")
