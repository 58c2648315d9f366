"""Tests the number of threads of a worker, in examples for large, small and shared machines."""

import os
from pathlib import Path

import pytest

from services.worker.platform_choice import num_local_workers
from services.worker.platforms.machine import usable_processors
from services.worker.platforms.threads import Processors, ThreadChoice, choose_threads
from services.worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        (Processors(1, 1), ThreadChoice(1, "1 core")),
        (Processors(2, 2), ThreadChoice(2, "2 cores")),
        (Processors(7, 7), ThreadChoice(7, "7 cores")),
        (Processors(8, 8), ThreadChoice(7, "8 cores, one left to other services")),
        (Processors(16, 8), ThreadChoice(8, "16 processors on 8 cores")),
        (Processors(2, 1), ThreadChoice(1, "2 processors on 1 core")),
        (Processors(64, 64, 2.5), ThreadChoice(2, "64 cores, a quota of 2.5")),
        (Processors(64, 32, 0.5), ThreadChoice(1, "64 processors on 32 cores, a quota of 0.5")),
        (Processors(4, 4, 16.0), ThreadChoice(4, "4 cores")),
    ],
)
def test_every_core_that_can_be_kept_busy_computes(
    processors: Processors, expected: ThreadChoice
) -> None:
    assert choose_threads(processors) == expected


def test_workers_on_one_machine_share_its_cores() -> None:
    shared = choose_threads(Processors(8, 8), num_sharers=2)
    assert shared == ThreadChoice(3, "8 cores, one left to other services, shared by 2 workers")
    assert choose_threads(Processors(2, 2), num_sharers=4).num_threads == 1


def test_a_requested_number_is_used_and_the_default_is_logged() -> None:
    asked = choose_threads(Processors(2, 2), asked=5)
    assert asked == ThreadChoice(5, "as asked for; by default 2: 2 cores")
    assert str(asked) == "5 threads (as asked for; by default 2: 2 cores)"
    assert str(choose_threads(Processors(1, 1))) == "1 thread (1 core)"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine on which each processor that this process may run on is half of a core."""
    for processor in os.sched_getaffinity(0):
        topology = tmp_path / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        pair = processor // 2 * 2
        (topology / "core_cpus_list").write_text(f"{pair}-{pair + 1}\n")
    (tmp_path / "self").mkdir()
    return tmp_path


def read(machine: Path) -> Processors:
    return usable_processors(proc=machine, cgroup=machine, devices=machine)


def test_siblings_are_one_core_and_unlisted_processors_are_a_core_each(
    machine: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    allowed = os.sched_getaffinity(0)
    assert read(machine) == Processors(len(allowed), len({cpu // 2 for cpu in allowed}))
    assert read(tmp_path_factory.mktemp("silent")) == Processors(len(allowed), len(allowed))


def test_the_least_quota_of_the_groups_around_the_process_holds(machine: Path) -> None:
    (machine / "self/cgroup").write_text("0::/machine/service\n")
    (machine / "machine/service").mkdir(parents=True)
    (machine / "machine/service/cpu.max").write_text("max 100000\n")
    assert read(machine).quota is None
    (machine / "machine/cpu.max").write_text("150000 100000\n")
    (machine / "cpu.max").write_text("400000 100000\n")
    assert read(machine).quota == 1.5


def test_quotas_of_the_first_version_of_control_groups_hold_too(machine: Path) -> None:
    (machine / "self/cgroup").write_text("4:cpuacct,cpu:/docker/0123\n")
    group = machine / "cpu/docker/0123"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("50000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert read(machine).quota is None
    (group / "cpu.cfs_quota_us").write_text("25000\n")
    assert read(machine).quota == 0.5


def test_replicas_on_one_machine_are_sharers_too(tmp_path: Path) -> None:
    assert num_local_workers(WorkerSettings(model=tmp_path), None) == 1
    settings = WorkerSettings(model=tmp_path, num_local_replicas=3)
    assert num_local_workers(settings, None) == 3
