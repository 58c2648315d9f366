"""How a comparison ended: its word in a table, and the error of one that did not end."""

from __future__ import annotations

from collections.abc import Callable


def attempt(work: Callable[[], bool], name: str) -> bool:
    """The result of `work`. Prints `name` and the error, and returns False, if it raises one."""
    try:
        return work()
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        print(f"{name} | FAILED: {type(error).__name__}: {message} |", flush=True)
        return False


def verdict(good: bool) -> str:
    """The last column of a table: empty, or WRONG."""
    return "" if good else "WRONG"
