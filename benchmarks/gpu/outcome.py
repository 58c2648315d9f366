"""Prints results of comparisons, and errors of comparisons that failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

_NUM_PLACES = 4
"""Number of calls, the innermost first, that are printed with an error."""


def attempt(work: Callable[[], bool], name: str) -> bool:
    """Returns the result of `work`, or False after an error, which is printed with `name` and with
    the places of the innermost calls.
    """
    try:
        return work()
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        calls = reversed(traceback.extract_tb(error.__traceback__)[-_NUM_PLACES:])
        places = ", ".join(f"{Path(call.filename).name}:{call.lineno}" for call in calls)
        print(f"{name} | FAILED: {type(error).__name__}: {message} ({places}) |", flush=True)
        return False


def verdict(good: bool) -> str:
    """The last column of a table: empty, or WRONG."""
    return "" if good else "WRONG"
