"""Times on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

COPY_BYTES = 2**30


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """The shortest of several runs on the device."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))
