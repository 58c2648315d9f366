"""How `make test` divides the tests between six processes of pytest-xdist.

What starts servers or measures time runs in two of them, test after test, from the start: most of
that time is spent on waiting. What only computes runs in the other four, file by file, by one
thread each, so that two processors are busy also while some of the four wait, and at a low
priority, so that it delays the servers little. Each process imports and collects what it may run,
and no other test: that takes seconds of a processor. Without pytest-xdist all tests run in one
process, as they are collected.
"""

import asyncio
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import services.worker  # noqa: F401 - says how torch's threads wait, before a test imports torch

NUM_PROCESSES = 6
SERVERS = {
    "stacks": ("tests/e2e/", "tests/scheduler/integration/"),
    "services": (
        "tests/benchmarks/integration/",
        *(
            f"tests/{service}/integration/"
            for service in ("common", "gateway", "kvpool", "worker", "cli", "directory")
        ),
    ),
}
"""The tests of each of the first two processes, which take about as long."""
LONG_FILES = (
    "tests/parity/parallel/test_services_parity.py",
    "tests/parity/test_exact_logits.py",
    "tests/parity/test_random_schedules.py",
    "tests/parity/test_greedy_parity.py",
    "tests/worker/unit/test_xformers_kernels.py",
    "tests/parity/parallel/test_pipeline_parity.py",
    "tests/conformance/test_recordings.py",
    "tests/parity/test_offloading_parity.py",
    "tests/parity/test_speculation_parity.py",
    "tests/parity/test_draft_model_parity.py",
    "tests/conformance/test_replay_command.py",
    "tests/parity/test_scheduled_parity.py",
    "tests/parity/test_hybrid_parity.py",
)
"""Of the files that only compute, those that take longest: they come first, so that the short ones
occupy all processes to the end.
"""
NICENESS = 10
# Hypothesis tries the same examples in every run, whatever time each takes: what passed here passes
# on a slow machine. `make test ARGS=--hypothesis-profile=default` tries others.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")
LIMITED = pytest.StashKey[bool]()
"""Whether this process has limited what it uses of the processors."""
SESSION = pytest.StashKey[pytest.Session]()

# Imports and collected tests are not garbage: searching them again and again would take a third of
# the time of collection.
gc.disable()


def servers_of(nodeid: str) -> str | None:
    """The process of servers that a test or a directory belongs to, if it belongs to one."""
    return next((name for name, paths in SERVERS.items() if nodeid.startswith(paths)), None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keeps the session, whose number of tests the printed progress is a share of."""
    session.config.stash[SESSION] = session


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collects in each of the six processes of pytest-xdist what that one may run, and everything
    in one that replaces a process that crashed, or where there are not six.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {"workercount": 1})
    if worker["workercount"] != NUM_PROCESSES:
        return None
    number = int(worker["workerid"].removeprefix("gw"))
    own = dict(enumerate(SERVERS)).get(number)
    servers = servers_of(f"{collection_path.relative_to(config.rootpath).as_posix()}/")
    is_way_to_servers = servers is None and collection_path.is_dir()
    return None if number >= NUM_PROCESSES or is_way_to_servers or servers == own else True


def order(item: pytest.Item) -> int:
    """Sorts servers' tests, then long files, then the others."""
    servers = servers_of(item.nodeid)
    if servers is not None:
        return list(SERVERS).index(servers)
    file = item.nodeid.partition("::")[0]
    return len(SERVERS) + (LONG_FILES.index(file) if file in LONG_FILES else len(LONG_FILES))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests in processes of pytest-xdist."""
    if hasattr(config, "workerinput"):
        items.sort(key=order)


def pytest_collection_finish() -> None:
    """Exempts what is imported and collected from garbage collection: looking at it again and again
    takes a fifth of the processor time of tests that serve.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the servers' tests in two pieces, and the others file by file."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - ARGS works without it

    class ServersAndFiles(LoadScopeScheduling):
        """Its units of work are each process's tests of servers, and each file of the others. A
        process is handed the first unit that it has collected.
        """

        def _split_scope(self, nodeid: str) -> str:
            return servers_of(nodeid) or nodeid.partition("::")[0]

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            self.registered_collections[node] = list(collection)

        def schedule(self) -> None:
            if self.collection is None:
                for nodeid in chain.from_iterable(self.registered_collections.values()):
                    self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
                self.collection = list(chain.from_iterable(self.workqueue.values()))
                self.config.stash[SESSION].testscollected = len(self.collection)
            # A process begins a test once it knows of the next one: two units have two tests.
            for node in 2 * self.nodes:
                self._reschedule(node)

        def _reschedule(self, node: Any) -> None:
            own = self.registered_collections.get(node)
            pending = self._pending_of(self.assigned_work[node])
            if own is None or node.shutting_down or pending > 2:
                return
            scopes = (name for name, unit in self.workqueue.items() if next(iter(unit)) in own)
            scope = next(scopes, None)
            if scope is None:
                node.shutdown()
            else:
                self.workqueue.move_to_end(scope, last=False)
                self._assign_work_unit(node)

    return ServersAndFiles(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Limits what a process of pytest-xdist uses of the processors, before its first test: torch
    computes by one thread, unless a test sets another number, and beside servers at low priority.
    """
    if hasattr(item.config, "workerinput") and not item.config.stash.setdefault(LIMITED, False):
        item.config.stash[LIMITED] = True
        import torch  # noqa: PLC0415 - tests that are run without pytest-xdist may not need it

        torch.set_num_threads(1)
        if servers_of(item.nodeid) is None:
            os.nice(NICENESS)


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> None:
    """Keeps grpc.aio's poller thread until the process ends. It would end with the last channel or
    server, which a garbage collection in any later test may find, and which waits for the thread:
    for ever if a call of theirs is open (grpc 1.85).
    """
    import grpc.aio  # noqa: PLC0415 - after `services.worker`, as the services do

    async def initialize() -> None:
        grpc.aio.init_grpc_aio()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(initialize())
    loop.close()


@pytest.fixture(params=["port", "socket"])
def listening(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a service of a test listens: on a free port, or at a Unix socket, beside which its
    streams have sockets of their own.
    """
    with tempfile.TemporaryDirectory() as directory:  # short: paths of sockets have 107 bytes
        yield "127.0.0.1:0" if request.param == "port" else f"unix:{directory}/service.sock"
