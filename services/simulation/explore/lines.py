"""Finds lines in the log of a run that should not be there."""

import re
from collections.abc import Iterable

_NEVER = re.compile(
    r"a message of the scheduler is wrong|the stream of steps from the scheduler is closed,"
    r"|the kvpool refused a transaction: (transaction \d+ arrived|request) "
    r"|an event of pool .* is wrong|its answer to (transaction|step) \d+ is wrong"
    r"|WARNING the session of gateway .* is closed,"
    r"|< \S+ /stepwell\.(kvpool|scheduler|worker)\.\S+ "
    r"status (2|3|11|12|13|15) (?!device simulated: )"
)
"""The network neither alters nor reorders messages, so a wrong message shows a defect of its
sender. The numbers are gRPC statuses such as INVALID_ARGUMENT and INTERNAL.
"""
_HANGS = re.compile(r"session with scheduler \S+ ended: .* and hangs; its [1-9]")
_STEP = re.compile(r"/stepwell\.worker\.\S+/Execute ")
_SEVERE = re.compile(r"^\S+ \S+ (WARNING|ERROR) ")


def unexpected_line(lines: Iterable[str], *, is_calm: bool) -> str | None:
    """Returns the first line that a run should not have. If `is_calm`, no fault has occurred, so
    that warnings are unexpected too.
    """
    found = (one for one in lines if _NEVER.search(one) or (is_calm and _SEVERE.match(one)))
    return next(found, None)


def line_of_hang(lines: Iterable[str]) -> str | None:
    """Returns the first line about a scheduler that hangs although it has requests."""
    return next(filter(_HANGS.search, lines), None)


def line_of_step(lines: Iterable[str]) -> str | None:
    """Returns the first line about a step that a worker computes."""
    return next(filter(_STEP.search, lines), None)
