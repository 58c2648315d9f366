"""Writes to standard output and error, which may be unwritable, such as on a full disk."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def complain(sentence: str) -> None:
    """Writes a sentence to standard error. A failure to write is ignored."""
    with suppress(OSError):
        print(sentence, file=sys.stderr)


def drop_unwritten(*streams: TextIO | None) -> None:
    """Flushes the streams and drops text that cannot be written. If the text stayed in the streams,
    Python would fail to flush them at exit, and exit with status 120 instead of the program's own.
    """
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
