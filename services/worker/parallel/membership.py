"""Determines this process's rank and group from settings or environment variables.

torch's launchers set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT. In a Kubernetes StatefulSet a
pod's host name ends with its ordinal.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.process.settings import SettingError
from services.worker.settings import WorkerSettings

DEFAULT_MASTER_ADDR = "127.0.0.1"
DEFAULT_MASTER_PORT = 29_500

_ORDINAL = re.compile(r"-(\d+)$")


@dataclass(frozen=True, slots=True)
class Membership:
    """This process's rank in a group of `size` ranks. Rank 0 listens at the master's address.

    Ranks are numbered pipeline stage by pipeline stage.
    """

    rank: int = 0
    size: int = 1
    master_addr: str = DEFAULT_MASTER_ADDR
    master_port: int = DEFAULT_MASTER_PORT
    pipeline_parallel_size: int = 1

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks in a stage, each of which has a part of every layer of the stage."""
        return self.size // self.pipeline_parallel_size

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank, from 0 on."""
        return self.rank // self.tensor_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its stage, from 0 on."""
        return self.rank % self.tensor_parallel_size


def find_membership(settings: WorkerSettings, environ: Mapping[str, str]) -> Membership:
    """Determines the rank and its group. Settings override environment variables. Raises
    SettingError if the resulting rank and sizes contradict each other.
    """
    stages = settings.pipeline_parallel_size
    size = _size(settings, environ)
    if size == 1:
        if settings.rank:
            raise SettingError(
                f"--rank is {settings.rank}, but --tensor-parallel-size and "
                "--pipeline-parallel-size are 1"
            )
        return Membership()
    rank, source = _rank(settings, environ)
    if rank >= size:
        raise SettingError(f"{source} is {rank}, but the ranks of this group are 0 to {size - 1}")
    port = settings.master_port or _number(environ, "MASTER_PORT") or DEFAULT_MASTER_PORT
    address = settings.master_addr or environ.get("MASTER_ADDR") or DEFAULT_MASTER_ADDR
    return Membership(rank, size, address, port, stages)


def _size(settings: WorkerSettings, environ: Mapping[str, str]) -> int:
    stages, per_stage = settings.pipeline_parallel_size, settings.tensor_parallel_size
    if per_stage is not None:
        return stages * per_stage
    size = _number(environ, "WORLD_SIZE") or stages
    if size % stages:
        raise SettingError(
            f"WORLD_SIZE is {size}, which is not a multiple of --pipeline-parallel-size {stages}"
        )
    return size


def _rank(settings: WorkerSettings, environ: Mapping[str, str]) -> tuple[int, str]:
    if settings.rank is not None:
        return settings.rank, "--rank"
    rank = _number(environ, "RANK")
    if rank is not None:
        return rank, "RANK"
    ordinal = _ORDINAL.search(environ.get("HOSTNAME", ""))
    if ordinal is None:
        raise SettingError(
            "the rank of this worker in its group, from 0, must be given: set --rank, RANK, or a "
            "HOSTNAME that ends with the number"
        )
    return int(ordinal[1]), "the number at the end of HOSTNAME"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise SettingError(f"{name} must be a whole number, not {text!r}")
    return int(text)
