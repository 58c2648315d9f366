"""Memory that processes of one machine share: one makes it, the others map it by its address.

It has no name in a file system, so that nothing of it is left behind, however a process ends. The
others open it through /proc, which takes the same user and the same process namespace. A random
number in its last bytes shows that it is the memory that was meant.
"""

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOKEN_BYTES = 16


@contextmanager
def made_memory(num_bytes: int) -> Iterator[tuple[mmap.mmap, str]]:
    """Memory of zeros, and the address by which others may map it until the end of the context.
    Raises OSError.
    """
    descriptor = os.memfd_create("stepwell-ranks", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes + _TOKEN_BYTES)
        memory = mmap.mmap(descriptor, num_bytes + _TOKEN_BYTES)
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory[num_bytes:] = token
        yield memory, f"/proc/{os.getpid()}/fd/{descriptor} {token.hex()}"
    finally:
        os.close(descriptor)


def mapped_memory(address: str, num_bytes: int) -> mmap.mmap | None:
    """The memory of `num_bytes` at an address, or None if this process cannot map it."""
    path, token = address.split()
    with suppress(OSError, ValueError), Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), num_bytes + _TOKEN_BYTES)
        if memory[num_bytes:] == bytes.fromhex(token):
            return memory
    return None
