"""The number of usable processors, from recorded /proc and /sys files of several machines."""

import os
from pathlib import Path

import pytest

from services.common.process.processors import Processor, cpu_list, usable_processors
from tests.machines import Machine

V2 = {"machine/service/cpu.max": "max 100000", "machine/cpu.max": "150000 100000"}


@pytest.mark.parametrize(
    ("machine", "quota"),
    [
        (Machine(64), None),
        (Machine(64, limits={"cpu.max": "max 100000"}), None),
        (Machine(64, limits={"cpu.max": "150000 100000"}), 1.5),
        (Machine(64, cgroup="0::/machine/service", limits=V2), 1.5),
        (Machine(64, cgroup="0::/machine/service", limits=V2 | {"cpu.max": "50000 100000"}), 0.5),
        (Machine(64, cgroup="0::/other", limits=V2), None),
        (
            Machine(
                64,
                cgroup="11:memory:/docker/01\n4:cpu,cpuacct:/docker/01\n0::/",
                limits={
                    "cpu,cpuacct/docker/01/cpu.cfs_quota_us": "75000",
                    "cpu,cpuacct/docker/01/cpu.cfs_period_us": "50000",
                    "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1",
                    "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
                },
            ),
            1.5,
        ),
        (
            Machine(
                64,
                cgroup="4:cpuacct,cpu:/docker/01",
                limits={"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000"},
            ),
            0.5,
        ),
    ],
    ids=["free", "max", "v2", "v2-parent", "v2-root", "v2-elsewhere", "v1", "v1-container"],
)
def test_the_least_quota_of_the_groups_around_the_process_is_found(
    machine: Machine, quota: float | None, tmp_path: Path
) -> None:
    assert usable_processors(machine.record(tmp_path)).quota == quota


@pytest.mark.parametrize(
    ("quota", "expected"), [(0.3, 1), (1.0, 1), (1.5, 2), (2.0, 2), (7.01, 8), (64.0, 64), (90, 64)]
)
def test_a_quota_is_rounded_up(quota: float, expected: int, tmp_path: Path) -> None:
    limits = {"cpu.max": f"{int(quota * 100_000)} 100000"}
    processors = usable_processors(Machine(64, limits=limits).record(tmp_path))
    assert processors.within_quota(64) == expected


def test_only_allowed_online_processors_count(tmp_path: Path) -> None:
    machine = Machine(8, num_threads=2, num_nodes=2, allowed="2-5,10-11", online="0-2,4-15")
    found = usable_processors(machine.record(tmp_path))
    assert found.allowed == (
        Processor(2, core=2, node=0),
        Processor(4, core=4, node=1),
        Processor(5, core=5, node=1),
        Processor(10, core=2, node=0),
        Processor(11, core=3, node=0),
    )
    assert (found.num_allowed, found.num_cores) == (5, 4)


def test_an_unlisted_processor_is_a_core_of_the_only_node(tmp_path: Path) -> None:
    found = usable_processors(tmp_path)
    assert found.allowed == tuple(Processor(n, core=n) for n in sorted(os.sched_getaffinity(0)))
    assert found.quota is None


def test_the_processors_of_this_machine() -> None:
    found = usable_processors()
    assert {each.number for each in found.allowed} == os.sched_getaffinity(0)
    assert all(each.core <= each.number for each in found.allowed)


def test_lists_of_processors() -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == set()
