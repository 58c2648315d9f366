"""A key book in a file. Each change replaces the whole file."""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.common.keys.book import KeyBook, book_from_text, book_to_text


def read_book(path: Path) -> KeyBook:
    """Reads the book in a file. Raises OSError or DamagedRecord."""
    return book_from_text(path.read_bytes())


def change_book(path: Path, change: Callable[[KeyBook], KeyBook]) -> None:
    """Replaces the book with the result of `change`. A missing file counts as an empty book, and is
    created as a file that only its owner can read. The new file has the permissions and, if this
    process may set them, the owner and the group of the old one. A link stays a link. Readers see
    either the old or the new file. Concurrent changes are applied one after the other. Raises
    OSError or DamagedRecord.
    """
    path = path.resolve()
    with _locked(path):
        _replace(path, book_to_text(change(read_book(path))))


def version_of(path: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes when the file changes. Returns None if there is no file, or if
    the file system fails.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the book's own file, and creates the file if it is missing. If the file is replaced
    while this process waits for the lock, locks the new file instead.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            version = version_of(path)
            if version is not None and version[0] == os.fstat(descriptor).st_ino:
                yield
                return
        finally:
            os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    old = path.stat()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    written = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            with suppress(PermissionError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
