"""Divides the tests between four processes of pytest-xdist, for `make test`.

Tests that start servers or measure time mostly wait. They run in two of the processes, each with
one test at a time. Tests that only compute run in the other two processes, file by file. The
computing processes have one thread and low priority, so that they hardly delay the servers. Each
process imports and collects only the tests that it may run, because collecting all tests takes 20
seconds of processor time. Without pytest-xdist all tests run in one process, in the order of
collection.
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
from services.cli.processes.ports import claim_port

NUM_PROCESSES = 4
SERVERS = {
    "stacks": (
        "tests/e2e/",
        "tests/cli/integration/",
        "tests/directory/integration/",
        "tests/kvpool/integration/",
        "tests/worker/integration/",
    ),
    "services": (
        "tests/benchmarks/integration/",
        "tests/common/integration/",
        "tests/gateway/integration/",
        "tests/gateway/options/",
        "tests/scheduler/integration/",
    ),
}
"""The tests with servers that each of the first two processes runs. Both processes end before the
tests that only compute, so that two processors are busy to the end.
"""
LONG_FILES = (
    "tests/worker/unit/test_xformers_kernels.py",
    "tests/parity/test_greedy_parity.py",
    "tests/parity/test_exact_logits.py",
    "tests/conformance/test_recordings.py",
    "tests/parity/parallel/test_services_parity.py",
    "tests/parity/parallel/test_pipeline_parity.py",
    "tests/parity/test_offloading_parity.py",
    "tests/simulation/test_explore.py",
    "tests/parity/test_draft_model_parity.py",
    "tests/parity/test_speculation_parity.py",
    "tests/parity/test_hybrid_parity.py",
    "tests/parity/test_random_schedules.py",
    "tests/worlds/test_worlds.py",
)
"""The slowest files that only compute. They run first, so that all processes end together."""
NICENESS = 10
# Hypothesis tries the same examples in every run, without a time limit for each, so that results do
# not depend on the machine's speed. `make test ARGS=--hypothesis-profile=default` tries other
# examples.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")
LIMITED = pytest.StashKey[bool]()
"""Whether this process has already limited its processor use."""
SESSION = pytest.StashKey[pytest.Session]()

# Collecting tests creates no garbage, but garbage collections would take a third of its time.
gc.disable()


def servers_of(nodeid: str) -> str | None:
    """The name of the process that runs a test or directory, from SERVERS. None for tests without
    servers.
    """
    return next((name for name, paths in SERVERS.items() if nodeid.startswith(paths)), None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stores the session, because the xdist scheduler below sets its number of tests."""
    session.config.stash[SESSION] = session


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Limits each of the four processes of pytest-xdist to its own tests. A process that replaces a
    crashed one collects all tests. With any other number of processes, each collects all tests.
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
    """The sort key of a test: tests with servers first, then slow files, then all other files."""
    servers = servers_of(item.nodeid)
    if servers is not None:
        return list(SERVERS).index(servers)
    file = item.nodeid.partition("::")[0]
    return len(SERVERS) + (LONG_FILES.index(file) if file in LONG_FILES else len(LONG_FILES))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=order)


def pytest_collection_finish() -> None:
    """Exempts imported modules and collected tests from garbage collections. Scanning them would
    take a fifth of the processor time of tests with servers.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes the tests with servers as two units of work, and all other tests file by file."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - ARGS works without it

    class ServersAndFiles(LoadScopeScheduling):
        """A scheduler of pytest-xdist. A unit of work is all tests with servers of one process, or
        one file of other tests. A process receives the first unit that it has collected.
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
            # pytest-xdist starts a test only when the process has the next test, too. So each
            # process gets two units, which have at least two tests.
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
    """Limits the processor use of a pytest-xdist process before its first test. torch uses one
    thread, unless a test sets another number. Processes that only compute have low priority.
    """
    if hasattr(item.config, "workerinput") and not item.config.stash.setdefault(LIMITED, False):
        item.config.stash[LIMITED] = True
        import torch  # noqa: PLC0415 - tests that are run without pytest-xdist may not need it

        torch.set_num_threads(1)
        if servers_of(item.nodeid) is None:
            os.nice(NICENESS)


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> None:
    """Keeps grpc.aio's poller thread alive until the process ends. Otherwise a garbage collection
    in a later test may free the last channel or server, and then waits for the end of the poller
    thread: for ever if a call is open (grpc 1.85).
    """
    import grpc.aio  # noqa: PLC0415 - after `services.worker`, as the services do

    async def initialize() -> None:
        grpc.aio.init_grpc_aio()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(initialize())
    loop.close()


@pytest.fixture(params=["port", "socket"])
def listening(request: pytest.FixtureRequest) -> Iterator[str]:
    """The listening address of a service in a test: a free port, or a Unix socket in a directory of
    its own, where the service also creates the sockets of its local streams.
    """
    with (
        tempfile.TemporaryDirectory() as directory
    ):  # short, since socket paths are limited to 107 bytes
        yield "127.0.0.1:0" if request.param == "port" else f"unix:{directory}/service.sock"


@pytest.fixture
def free_port() -> int:
    return claim_port("127.0.0.1", 0, "--port")
