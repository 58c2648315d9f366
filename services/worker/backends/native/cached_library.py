"""A compiled library in its place on disk, and the proof that it is whole.

A library that was cut short, by a full disk or a machine that stopped, may load and end the process
later. So its digest lies beside it, and what does not match it counts as absent.
"""

import ctypes
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path


class KeptLibrary:
    """The library `name` in a directory, which need not exist."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self._library = directory / f"{name}.so"
        self._digest = directory / f"{name}.sha256"

    @property
    def is_there(self) -> bool:
        """Whether something is kept, whole or not."""
        return self._library.exists()

    def load(self) -> ctypes.CDLL | None:
        """The library; None where it is not there or not whole. Raises OSError where it is, and
        cannot be loaded.
        """
        try:
            digest, kept = _digest(self._library), self._digest.read_text()
        except OSError:
            return None
        return ctypes.CDLL(str(self._library)) if digest == kept else None

    def put(self, made: Path) -> None:
        """Keeps a copy, for one caller at a time. Raises OSError, and leaves nothing half done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        aside = self._library.with_suffix(".new")
        try:
            shutil.copyfile(made, aside)
            self._digest.write_text(_digest(aside))
            aside.replace(self._library)
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
