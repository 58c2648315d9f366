"""Looks for lines in the logs that no run should have."""

import re
from collections.abc import Iterable

_NEVER = re.compile(
    r"a message of the scheduler is wrong|the stream of steps ends:"
    r"|an event of pool .* is wrong|WARNING the session of .* ends:"
    r"|< \S+ /stepwell\.(kvpool|scheduler|worker)\.\S+ "
    r"status (2|3|11|12|13|15) (?!device simulated: )"
)
"""The network neither alters nor reorders messages: the sender of a wrong one has a defect. The
numbers are statuses of calls that are wrong in themselves, such as INVALID_ARGUMENT and INTERNAL.
"""
_STEP = re.compile(r"/stepwell\.worker\.\S+/Execute ")
_SEVERE = re.compile(r"^\S+ \S+ (WARNING|ERROR) ")


def unexpected_line(lines: Iterable[str], *, is_calm: bool) -> str | None:
    """The first line that a run should not have. `is_calm`: no fault occurred meanwhile, so that
    nothing is to be warned of.
    """
    found = (one for one in lines if _NEVER.search(one) or (is_calm and _SEVERE.match(one)))
    return next(found, None)


def line_of_step(lines: Iterable[str]) -> str | None:
    """The first line with a step of a worker."""
    return next(filter(_STEP.search, lines), None)
