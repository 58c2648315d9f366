"""`make test` divides the tests between processes. Each runs once, and progress ends at 100 %."""

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SERVERS, SESSION, pytest_xdist_make_scheduler

STACKS, SERVICES = (
    [f"{paths[0]}test_a.py::test_{number}" for number in range(4)] for paths in SERVERS.values()
)
FILES = [f"tests/x/test_{file}.py::test_{number}" for file in "abcdefg" for number in range(3)]


class Process:
    """A process of pytest-xdist: its collected tests, and its queue of tests to run."""

    def __init__(self, collected: list[str]) -> None:
        self.collected = collected
        self.queue: deque[int] = deque()
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


class Config:
    """The part of pytest's configuration that conftest.py reads to divide the tests."""

    def __init__(self, num_processes: int, session: Any) -> None:
        self.stash = pytest.Stash()
        self.stash[SESSION] = session
        self._processes = ["popen"] * num_processes

    def getvalue(self, _: str) -> list[str]:
        return self._processes


def test_every_test_runs_once_and_the_progress_counts_each() -> None:
    processes = [Process(own) for own in (STACKS, SERVICES, FILES, FILES, FILES)]
    session = SimpleNamespace(testscollected=0)
    config: Any = Config(len(processes), session)
    scheduler = pytest_xdist_make_scheduler(config, None)
    for process in processes:
        scheduler.add_node(process)
    for process in processes:
        scheduler.add_node_collection(process, process.collected)
    scheduler.schedule()
    ran = []
    while any(process.queue for process in processes):
        for process in processes:
            # A process starts a test only when it has the next one, or knows that none is left.
            if len(process.queue) > 1 or (process.queue and process.shutting_down):
                index = process.queue.popleft()
                ran.append(process.collected[index])
                scheduler.mark_test_complete(process, index)
    assert sorted(ran) == sorted({*STACKS, *SERVICES, *FILES})
    assert len(ran) == session.testscollected
