"""Memory that several processes on one machine share. One process allocates the memory, and the
others map it by its address.

The memory has no name in a file system, so that it is freed when its processes end, whatever the
reason. Other processes open it through /proc, which requires the same user and the same process
namespace. A random token in its last bytes identifies the memory.
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
    """Allocates zeroed memory. Yields the memory and its address, by which other processes can map
    it until the context ends. Raises OSError.
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
    """Maps the `num_bytes` of memory at an address. Returns None if this process cannot map it."""
    path, token = address.split()
    with suppress(OSError, ValueError), Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), num_bytes + _TOKEN_BYTES)
        if memory[num_bytes:] == bytes.fromhex(token):
            return memory
    return None
