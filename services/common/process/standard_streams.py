"""Uses standard output and error although they may be unwritable, such as on a full disk."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def complain(sentence: str) -> None:
    """Writes a sentence to standard error. Ignores a failure."""
    with suppress(OSError):
        print(sentence, file=sys.stderr)


def drop_unwritten(*streams: TextIO | None) -> None:
    """Flushes the streams and drops text that cannot be written. Without this, Python would flush
    again at exit, fail, and exit with status 120 instead of the program's own status.
    """
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
