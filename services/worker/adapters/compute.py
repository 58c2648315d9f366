"""The one thread that touches tensors.

The event loop stays free while it computes, so that the next step's message is already decoded when
the step before ends; and one thread means one team of the processor's workers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other, in the order they came."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Queues `function`; its result or exception as a future of the running loop."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Waits for what runs, drops what is queued."""
        self._executor.shutdown(wait=True, cancel_futures=True)
