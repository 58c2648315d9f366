"""How `make test` divides the tests between two processes of pytest-xdist.

What starts servers or measures time runs in one process, test after test, from the start. What only
computes runs in the other, file by file, by one thread and at a lower priority, so that it delays
the servers little; the process of the servers takes what is left of it. Without pytest-xdist all
tests run in one process, as they are collected.
"""

import os
from typing import Any

import pytest

SERVERS = (
    "tests/e2e/",
    "tests/benchmarks/integration/",
    *(
        f"tests/{service}/integration/"
        for service in ("gateway", "scheduler", "kvpool", "worker", "cli")
    ),
)
LONG_FILES = (
    "tests/parity/test_services_parity.py",
    "tests/parity/test_exact_logits.py",
    "tests/parity/test_greedy_parity.py",
    "tests/worker/unit/test_xformers_kernels.py",
)
"""Of the files that only compute, those that take longest: they come first, so that the short ones
occupy both processes to the end.
"""
NICENESS = 5
LIMITED = pytest.StashKey[bool]()
"""Whether this process has limited what it uses of the processors."""


def starts_servers(nodeid: str) -> bool:
    """Whether a test belongs to the process of servers."""
    return nodeid.startswith(SERVERS)


def order(item: pytest.Item) -> int:
    """Sorts servers' tests, then long files, then the others."""
    if starts_servers(item.nodeid):
        return 0
    file = item.nodeid.partition("::")[0]
    return 1 + LONG_FILES.index(file) if file in LONG_FILES else 1 + len(LONG_FILES)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests in processes of pytest-xdist."""
    if hasattr(config, "workerinput"):
        items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the servers' tests in one piece, and the others file by file."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - ARGS works without it

    class ServersAndFiles(LoadScopeScheduling):
        """Its units of work are the servers' tests, and each file of the others."""

        def _split_scope(self, nodeid: str) -> str:
            return "servers" if starts_servers(nodeid) else nodeid.partition("::")[0]

    return ServersAndFiles(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Limits what a process of pytest-xdist uses of the processors, before its first test: torch
    computes by one thread, unless a test sets another number, and beside servers at low priority.
    """
    if hasattr(item.config, "workerinput") and not item.config.stash.setdefault(LIMITED, False):
        item.config.stash[LIMITED] = True
        import torch  # noqa: PLC0415 - tests that are run without pytest-xdist may not need it

        torch.set_num_threads(1)
        if not starts_servers(item.nodeid):
            os.nice(NICENESS)
