"""A compiled library on disk, with a digest that proves that it is complete.

A full disk or a crash can truncate the library's file. A truncated library may be loaded without an
error and crash the process later, so a library is loaded only if it matches its digest.
"""

import ctypes
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path


class CachedLibrary:
    """The compiled library `name` in a directory. Neither needs to exist before `put`."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self._library = directory / f"{name}.so"
        self._digest = directory / f"{name}.sha256"

    @property
    def exists(self) -> bool:
        """Whether there is a file, complete or not."""
        return self._library.exists()

    def load(self) -> ctypes.CDLL | None:
        """Loads the library. Returns None if it does not exist or is incomplete. Raises OSError if
        it is complete but cannot be loaded.
        """
        try:
            digest, expected = _digest(self._library), self._digest.read_text()
        except OSError:
            return None
        return ctypes.CDLL(str(self._library)) if digest == expected else None

    def put(self, compiled: Path) -> None:
        """Stores a copy of the compiled library. Only one process may call this at a time. If it
        raises OSError, nothing is stored.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        new = self._library.with_suffix(".new")
        try:
            shutil.copyfile(compiled, new)
            self._digest.write_text(_digest(new))
            new.replace(self._library)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
