"""Times work on a GPU."""

from __future__ import annotations

from collections.abc import Callable
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
