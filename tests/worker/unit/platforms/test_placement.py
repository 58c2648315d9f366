"""On which processors a worker's threads run: on recorded machines, and on this machine."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch

from services.common.process.processors import usable_processors
from services.common.process.settings import SettingError
from services.worker.backends.choices import bind_problem
from services.worker.build import load_worker
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from services.worker.platform_choice import local_worker
from services.worker.platforms.placement import (
    LocalWorker,
    bind_and_set,
    cores_first,
    list_text,
    memory_sharers,
    place_threads,
)
from services.worker.platforms.threads import ThreadChoice
from services.worker.settings import WorkerSettings
from tests.machines import Machine


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """A fake Group: the ranks that run on this machine, and the worker's rank and group size."""

    local_ranks: list[int]
    membership: Membership


TWO_SOCKETS = Machine(64, num_threads=2, num_nodes=2)
QUOTA = {"cpu.max": "150000 100000"}


@pytest.mark.parametrize(
    ("machine", "count", "expected"),
    [
        (Machine(8), 1, ["7:"]),
        (Machine(8), 2, ["3:", "3:"]),
        (Machine(32, num_threads=2), 1, ["32:"]),
        (Machine(8, num_nodes=2), 1, ["4:0-3"]),
        (Machine(8, num_nodes=2), 2, ["4:0-3", "4:4-7"]),
        (Machine(32, num_nodes=2), 1, ["16:0-15"]),
        (Machine(32, num_nodes=2), 2, ["15:0-14", "15:16-30"]),
        (TWO_SOCKETS, 1, ["32:0-31"]),
        (TWO_SOCKETS, 2, ["32:0-31", "32:32-63"]),
        (TWO_SOCKETS, 4, ["16:0-15", "16:16-31", "16:32-47", "16:48-63"]),
        (TWO_SOCKETS, 3, ["16:0-15", "16:16-31", "32:32-63"]),
        (Machine(128, num_nodes=8), 3, ["16:0-15", "16:32-47", "16:80-95"]),
        (Machine(8, num_nodes=8), 1, ["1:0"]),
        (Machine(4, num_nodes=2), 6, ["1:0", "1:0", "1:1", "1:2", "1:2", "1:3"]),
        (Machine(4, 2, 2, are_adjacent=True), 2, ["2:0,2", "2:4,6"]),
        (Machine(8, 2, 2, online="0,2-15"), 2, ["4:0,2-3,9", "4:4-7"]),
        (Machine(8, 2, 2, allowed="2-5"), 2, ["2:2-3", "2:4-5"]),
        (Machine(8, 2, 2, allowed="4-7,12-15"), 1, ["4:"]),
        (Machine(64, 1, 2, limits=QUOTA), 1, ["2:"]),
        (Machine(64, 1, 2, limits=QUOTA), 2, ["1:", "1:"]),
        (Machine(8, 1, 2, limits={"cpu.max": "800000 100000"}), 2, ["4:0-3", "4:4-7"]),
    ],
)
def test_a_worker_has_the_cores_of_one_node(
    machine: Machine, count: int, expected: list[str], tmp_path: Path
) -> None:
    """Expected texts are NUMBER_OF_THREADS:PROCESSORS, without processors if none are bound."""
    processors = usable_processors(machine.record(tmp_path))
    plans = [place_threads(processors, LocalWorker(index, count)) for index in range(count)]
    assert [f"{plan.num_threads}:{list_text(plan.processors)}" for plan in plans] == expected


@pytest.mark.parametrize(
    ("asked", "bind", "expected"),
    [
        (8, "auto", ThreadChoice(8, "", tuple(range(32, 40)))),
        (40, "auto", ThreadChoice(40, "", (*range(32, 64), *range(96, 104)))),
        (99, "auto", ThreadChoice(99, "", (*range(32, 64), *range(96, 128)))),
        (None, "0-7|32-35,96-99", ThreadChoice(8, "", (32, 33, 34, 35, 96, 97, 98, 99))),
        (4, "0-7|32-35,96-99", ThreadChoice(4, "", (32, 33, 34, 35))),
        (None, "nobind", ThreadChoice(32, "")),
    ],
)
def test_cores_are_filled_before_their_second_processors(
    asked: int | None, bind: str, expected: ThreadChoice, tmp_path: Path
) -> None:
    processors = usable_processors(TWO_SOCKETS.record(tmp_path))
    plan = place_threads(processors, LocalWorker(1, 2), asked, bind)
    assert (plan.num_threads, plan.processors) == (expected.num_threads, expected.processors)


def test_the_log_has_the_node_and_the_processors(tmp_path: Path) -> None:
    processors = usable_processors(Machine(32, num_nodes=2).record(tmp_path))
    assert str(place_threads(processors, LocalWorker(3, 4))) == (
        "8 threads (16 cores of node 1, of 2 nodes, one left to other services, "
        "shared by 2 workers, bound to 23-30)"
    )
    adjacent = usable_processors(Machine(2, 2, are_adjacent=True).record(tmp_path / "adjacent"))
    assert [processor.number for processor in cores_first(adjacent.allowed)] == [0, 2, 1, 3]


def test_lists_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    processors = usable_processors(Machine(4).record(tmp_path))
    with pytest.raises(SettingError, match="has only 1 lists, but worker 1 of the 2 local workers"):
        place_threads(processors, LocalWorker(1, 2), bind="0-1")
    with pytest.raises(SettingError, match="may not use processors 4-5"):
        place_threads(processors, bind="3-5")
    assert [bind_problem(value) for value in ("auto", "nobind", "0-1,4|2")] == [None] * 3
    assert all(bind_problem(value) for value in ("", "0-1|", "all", "3-x"))


def test_a_worker_with_an_unusable_list_does_not_start(tmp_path: Path) -> None:
    settings = WorkerSettings(model=tmp_path, cpu_omp_threads_bind="4000")
    with pytest.raises(SettingError, match="may not use processors 4000"):
        load_worker(settings, lambda: None, None)


def test_replicas_are_numbered_before_their_ranks(tmp_path: Path) -> None:
    settings = WorkerSettings(model=tmp_path, num_local_replicas=3, local_replica=2)
    assert local_worker(settings, None) == LocalWorker(2, 3)
    assert local_worker(WorkerSettings(model=tmp_path), None) == LocalWorker(0, 1)
    with pytest.raises(SettingError, match="--local-replica 1 must be below"):
        local_worker(WorkerSettings(model=tmp_path, local_replica=1), None)


def test_two_ranks_of_a_replica_have_successive_numbers(tmp_path: Path) -> None:
    settings = WorkerSettings(model=tmp_path, num_local_replicas=2, local_replica=1)
    workers = [
        local_worker(settings, cast(Group, FormedGroup([0, 1], Membership(rank, 2))))
        for rank in range(2)
    ]
    assert workers == [LocalWorker(2, 4), LocalWorker(3, 4)]
    # Ranks 2 and 3 of the group run on its second machine.
    far = FormedGroup([2, 3], Membership(3, 4))
    assert local_worker(WorkerSettings(model=tmp_path), cast(Group, far)) == LocalWorker(1, 2)


@pytest.mark.parametrize(
    ("machine", "count", "bind", "expected"),
    [
        (Machine(8), 1, "auto", 1),
        (Machine(8), 3, "auto", 3),
        (TWO_SOCKETS, 1, "auto", 2),
        (TWO_SOCKETS, 4, "auto", 4),
        (TWO_SOCKETS, 1, "nobind", 1),
        (Machine(64, 1, 2, limits=QUOTA), 1, "auto", 1),
    ],
)
def test_a_worker_that_is_bound_to_a_node_uses_the_nodes_part_of_the_memory(
    machine: Machine, count: int, bind: str, expected: int, tmp_path: Path
) -> None:
    processors = usable_processors(machine.record(tmp_path))
    assert memory_sharers(processors, LocalWorker(0, count), bind) == expected


def test_the_threads_of_a_team_are_bound_and_others_are_not() -> None:
    """torch's threads run on the processors of the thread that starts them."""
    before, masks = os.sched_getaffinity(0), set[str]()
    chosen, tasks = max(before), Path("/proc/self/task")

    def compute() -> None:
        own = tasks / str(threading.get_native_id())
        others = set(tasks.iterdir()) - {own}
        bind_and_set(place_threads(usable_processors(), asked=3, bind=f"{chosen}"))
        torch.ones(1_000_000).exp_()
        for task in set(tasks.iterdir()) - others:
            status = (task / "status").read_text()
            masks.add(status.partition("Cpus_allowed_list:")[2].splitlines()[0].strip())

    number = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(number)
    assert masks == {str(chosen)}
    assert os.sched_getaffinity(0) == before
