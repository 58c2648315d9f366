"""Limits of a gateway process: memory and open files."""

import ctypes
import logging
import resource
import sys

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 256 * 1024
_NUM_ARENAS = 2
_FILES_BESIDES = 128
"""Open files besides clients' connections: listeners, schedulers, tracing, libraries."""


def give_memory_back() -> None:
    """Lets large blocks return to the system as soon as they are free.

    Left alone, glibc keeps more and more of them once some were freed, and in a heap for each
    thread, so that a burst of large requests stays in the process for good. Other C libraries are
    left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def connections_within_limit(wanted: int) -> int:
    """Raises the limit of open files as far as it goes, and returns how many connections, of HTTP
    and as many of gRPC, fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted
    possible = max(1, (hard - _FILES_BESIDES) // 2)
    if possible < wanted:
        logger.warning(
            "%d connections are allowed instead of %d: this process may open %d files",
            possible,
            wanted,
            hard,
        )
    return min(possible, wanted)
