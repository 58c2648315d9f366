"""How the C library's allocator gives memory back."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 256 * 1024
_NUM_ARENAS = 2


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
