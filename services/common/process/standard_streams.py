"""Standard output and error, where they cannot be written to, as on a full disk."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def complain(sentence: str) -> None:
    """Writes to standard error, if that can be written to."""
    with suppress(OSError):
        print(sentence, file=sys.stderr)


def drop_unwritten(*streams: TextIO | None) -> None:
    """Writes what the streams hold, and drops what cannot be written. Python would try once more at
    the end of the process, and end it with 120 instead of its own status.
    """
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
