"""The one thread that touches tensors, and one that waits for what a device brings back.

The event loop stays free while it computes, so that the next step's message is already decoded when
the step before ends; and one thread means one team of the processor's workers. Waiting apart from
it leaves it free to queue the next step.
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
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="download")

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Queues `function`; its result or exception as a future of the running loop."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function)

    def submit_wait(self, wait: Callable[[], T]) -> "asyncio.Future[T]":
        """As `submit`, for what only waits: behind other such, beside what computes."""
        return asyncio.get_running_loop().run_in_executor(self._waiting, wait)

    def close(self) -> None:
        """Waits for what runs, drops what is queued."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._waiting.shutdown(wait=True, cancel_futures=True)
