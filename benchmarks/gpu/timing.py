"""Times work on a GPU, and finds operations for which the host waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COPY_BYTES = 2**30


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Runs `work` several times. Returns its shortest time on the device, in seconds."""
    make_event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(repeats + 3):
        begin, end = (make_event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[3:])


def copy_bandwidth() -> float:
    """The bytes per second that a copy on the device reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def waiting_operations(work: Callable[[], object]) -> list[str]:
    """Runs work. Returns the files and lines of operations for which the host waited for the GPU.
    Waiting for an event, as for a step's tokens, does not count.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    return sorted({f"{Path(one.filename).name}:{one.lineno}" for one in found})
