"""Sets limits of a gateway process: memory and open files."""

import ctypes
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 256 * 1024
_NUM_ARENAS = 2
_FILES_BESIDES = 128
"""Number of open files reserved for other purposes than clients' connections, such as listeners,
schedulers, tracing and libraries.
"""


def give_memory_back() -> None:
    """Configures glibc to return large memory blocks to the system as soon as they are freed.

    By default, glibc keeps more and larger freed blocks after a large block was freed, and gives
    threads their own heaps, so that the memory of a burst of large requests is never returned. Does
    nothing with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def connections_within_limit(wanted: int) -> int:
    """Raises the soft limit on open files to the hard limit. Returns the number of HTTP
    connections, at most `wanted`, that the limit allows together with the same number of gRPC
    connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted
    possible = max(1, (hard - _FILES_BESIDES) // 2)
    if possible < wanted:
        logger.warning(
            "only %d connections are accepted instead of %d, since this process may open only %d "
            "files",
            possible,
            wanted,
            hard,
        )
    return min(possible, wanted)
