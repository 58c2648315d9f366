"""Ranks of one group in threads of the test's process, over gloo on the loopback interface."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.cli.ports import claim_port
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership

T = TypeVar("T")

TIMEOUTS = Timeouts(join_seconds=20, collective_seconds=20)


def free_port() -> int:
    """A port that nothing listens on."""
    return claim_port("127.0.0.1", 0, "--port")


class RankThread:
    """A rank, and why its group broke, if it did."""

    def __init__(self, rank: int, size: int, port: int, timeouts: Timeouts) -> None:
        self.broken: Future[GroupBroken] = Future()
        self.group = Group(
            Membership(rank, size, "127.0.0.1", port),
            timeouts,
            self.broken.set_result,
            lambda: None,
        )


def on_ranks(size: int, work: Callable[[RankThread], T], timeouts: Timeouts = TIMEOUTS) -> list[T]:
    """What each rank's `work` gives, in rank order. Every group is left at the end."""
    port, done = free_port(), threading.Barrier(size)

    def run(rank: int) -> T:
        joined = RankThread(rank, size, port, timeouts)
        try:
            return work(joined)
        finally:
            done.wait(60)
            joined.group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
