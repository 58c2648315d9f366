"""Prints results of comparisons, and errors of comparisons that failed."""

from __future__ import annotations

from collections.abc import Callable


def attempt(work: Callable[[], bool], name: str) -> bool:
    """Returns the result of `work`, or False after an error, which is printed with `name`."""
    try:
        return work()
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        print(f"{name} | FAILED: {type(error).__name__}: {message} |", flush=True)
        return False


def verdict(good: bool) -> str:
    """The last column of a table: empty, or WRONG."""
    return "" if good else "WRONG"
