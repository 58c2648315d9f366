"""Prints a benchmark's report to standard output, and its progress to standard error."""

import sys
import time


def show(*parts: str) -> None:
    print("\n\n".join(parts), end="\n\n", flush=True)


def log(line: str) -> None:
    """Prints a line of progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def messages(error: BaseException) -> list[str]:
    """The message of an error, or the messages of the errors in a group."""
    if isinstance(error, BaseExceptionGroup):
        return [message for inner in error.exceptions for message in messages(inner)]
    return [str(error) or "a measurement did not end in time"]
