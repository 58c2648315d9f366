"""The ranks of a tensor-parallel group as threads of the test's process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from services.cli.processes.ports import claim_port
from services.worker.backends.attention import CPU
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership
from services.worker.platforms.cpu_kernels import select_kernels

T = TypeVar("T")

TIMEOUTS = Timeouts(join_seconds=20, collective_seconds=20)


def free_port() -> int:
    return claim_port("127.0.0.1", 0, "--port")


@cache
def native_kernels() -> Kernels:
    return select_kernels(KernelsSetting.NATIVE, default_cache_directory(), lambda: None)


class RankThread:
    """A rank. `broken`: why its group broke, if it did. With torch's kernels it uses gloo."""

    def __init__(
        self, rank: int, size: int, port: int, timeouts: Timeouts, kernels: Kernels
    ) -> None:
        self.broken: Future[GroupBroken] = Future()
        self.group = Group(
            Membership(rank, size, "127.0.0.1", port),
            timeouts,
            self.broken.set_result,
            lambda: None,
        )
        self.ranks = self.group.ranks_on(CPU, kernels)


def on_ranks(
    size: int,
    work: Callable[[RankThread], T],
    timeouts: Timeouts = TIMEOUTS,
    kernels: Kernels | None = None,
) -> list[T]:
    """Runs `work` on each rank, and returns the results in rank order. Closes every group at the
    end. By default the ranks use the native kernels.
    """
    port, done = free_port(), threading.Barrier(size)

    def run(rank: int) -> T:
        joined = RankThread(rank, size, port, timeouts, kernels or native_kernels())
        try:
            return work(joined)
        finally:
            done.wait(60)
            joined.group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
