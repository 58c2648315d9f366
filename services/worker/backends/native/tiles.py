"""The processor's tile registers (Intel AMX), which multiply matrices: see cpp/tiles.h.

A process needs the operating system's permission to use tile registers. Linux grants it to all
threads of a process at once, unless a thread has a small signal stack. Linux before 5.16 and some
sandboxes always refuse.
"""

import ctypes
import os
from functools import cache

FEATURES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Linux's names of the processor's features that the kernels need for tiles."""
FLAGS = ("-DSTEPWELL_TILES",)
"""Compiler flags for kernels with tiles, which add products of bfloat16 in the order of tiles."""
EMULATED_FLAGS = (*FLAGS, "-DSTEPWELL_EMULATED_TILES")
"""Compiler flags for kernels that compute with emulated tiles, on any processor."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux on x86-64: a system call, its request for permission, and the tile registers."""


@cache
def refusal() -> str | None:
    """Asks for permission to use tiles. Returns None, or the system's reason for a refusal."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA))) == 0:
        return None
    return os.strerror(ctypes.get_errno())
