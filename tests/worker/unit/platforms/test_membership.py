"""A worker reads its rank from flags, from torch's variables, or from a pod's ordinal."""

from pathlib import Path
from typing import Any

import pytest

from services.common.process.settings import SettingError
from services.worker.parallel.membership import Membership, find_membership
from services.worker.settings import WorkerSettings

HERE = Path()


def membership(environ: dict[str, str], **flags: Any) -> Membership:
    return find_membership(WorkerSettings(model=HERE, **flags), environ)


def test_the_default_is_a_single_worker() -> None:
    assert membership({"HOSTNAME": "machine-7"}) == Membership(0, 1)
    assert membership({"WORLD_SIZE": "1", "RANK": "0"}) == Membership(0, 1)


def test_the_variables_of_torchs_launchers() -> None:
    environ = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert membership(environ) == Membership(3, 4, "10.0.0.1", 1234)


def test_flags_win_over_variables() -> None:
    environ = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    flags = {"tensor_parallel_size": 2, "rank": 0, "master_addr": "::1", "master_port": 9}
    assert membership(environ, **flags) == Membership(0, 2, "::1", 9)
    assert membership(environ, tensor_parallel_size=1) == Membership(0, 1)


def test_the_ordinal_of_a_stateful_set() -> None:
    environ = {"WORLD_SIZE": "2", "HOSTNAME": "worker-1", "MASTER_ADDR": "worker-0.worker"}
    assert membership(environ) == Membership(1, 2, "worker-0.worker", 29_500)
    assert membership({**environ, "RANK": "0"}).rank == 0


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ({"WORLD_SIZE": "6"}, {"pipeline_parallel_size": 3}),
        ({"WORLD_SIZE": "9"}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
    ],
)
def test_the_ranks_of_a_stage_follow_each_other(
    environ: dict[str, str], flags: dict[str, int]
) -> None:
    ranks = [membership({**environ, "RANK": str(rank)}, **flags) for rank in range(6)]
    assert {(own.size, own.tensor_parallel_size) for own in ranks} == {(6, 2)}
    places = [(own.stage, own.tensor_parallel_rank) for own in ranks]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_group_of_stages_alone() -> None:
    own = membership({"RANK": "1"}, pipeline_parallel_size=2)
    assert own == Membership(1, 2, pipeline_parallel_size=2)
    assert (own.stage, own.tensor_parallel_rank, own.tensor_parallel_size) == (1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "flags", "complaint"),
    [
        (
            {"RANK": "2"},
            {"tensor_parallel_size": 2},
            "RANK is 2, but the ranks of this group are 0 to 1",
        ),
        ({"RANK": "-1"}, {"tensor_parallel_size": 2}, "RANK must be a whole number, not '-1'"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE must be a whole number, not 'two'"),
        (
            {"HOSTNAME": "worker"},
            {"tensor_parallel_size": 2},
            "the rank of this worker in its group, from 0, must be given: set --rank",
        ),
        ({"HOSTNAME": "worker-5", "WORLD_SIZE": "2"}, {}, "the number at the end of HOSTNAME is 5"),
        ({}, {"rank": 1}, "--rank is 1, but --tensor-parallel-size and --pipeline-parallel-size"),
        (
            {"WORLD_SIZE": "4", "RANK": "0"},
            {"pipeline_parallel_size": 3},
            "WORLD_SIZE is 4, which is not a multiple of --pipeline-parallel-size 3",
        ),
        (
            {"RANK": "4"},
            {"pipeline_parallel_size": 4},
            "RANK is 4, but the ranks of this group are 0 to",
        ),
    ],
)
def test_contradictory_settings_are_refused_with_one_sentence(
    environ: dict[str, str], flags: dict[str, int], complaint: str
) -> None:
    with pytest.raises(SettingError) as error:
        membership(environ, **flags)
    assert str(error.value).startswith(complaint)
