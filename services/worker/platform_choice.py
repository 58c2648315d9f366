"""Selects the platform (CPU or CUDA) on which a worker computes, once when it starts."""

import logging
from collections.abc import Callable

import torch

from services.common.process.processors import usable_processors
from services.common.process.settings import SettingError
from services.worker.backends.attention import CPU
from services.worker.backends.choices import BIND_AUTO, BIND_NONE, DeviceSetting, KVCacheDtype
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.models.config import DtypeSetting
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.parallel.group import Group, select_cuda_device
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.cpu_kernels import select_kernels
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.interface import Platform
from services.worker.platforms.placement import LocalWorker, memory_sharers
from services.worker.settings import WorkerSettings

SelectPlatform = Callable[[WorkerSettings, Callable[[], None], Group | None], Platform]

logger = logging.getLogger(__name__)


def select_platform(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Platform:
    """Selects the platform for the settings.

    By default CUDA is selected if the machine and the settings meet all its requirements. If torch
    finds a GPU that is not used, the reason is logged. Raises UnsuitableDevice if the setting is
    CUDA and a requirement is not met, and if the setting is SIMULATED, because this function knows
    no simulated device. Raises KernelsUnavailable if the CPU is selected without the compiled
    kernels that the settings require.
    """
    if settings.device is DeviceSetting.SIMULATED:
        raise UnsuitableDevice("--device simulated is not available in this worker")
    may_be_cuda = torch.cuda.is_available() and settings.dtype is not DtypeSetting.FLOAT32
    tries_cuda = settings.device is DeviceSetting.AUTO and may_be_cuda
    for reason in _reasons_for_the_cpu(settings):
        if settings.device is DeviceSetting.CUDA:
            raise UnsuitableDevice(reason)
        if tries_cuda:
            logger.warning("computing on the CPU: %s", reason)
            tries_cuda = False
    if group is not None and (tries_cuda or settings.device is DeviceSetting.CUDA):
        select_cuda_device(group.local_ranks, group.membership.rank)
    if settings.device is DeviceSetting.CUDA:
        return _cuda_platform(settings, group)
    if tries_cuda:
        try:
            return _cuda_platform(settings, group)
        except UnsuitableDevice as error:
            logger.warning("computing on the CPU: %s", error.message)
    kernels = select_kernels(
        settings.kernels,
        default_cache_directory(),
        checkpoint_reached,
        batch_invariant=is_batch_invariant(settings, CPU),
    )
    num_sharers = memory_sharers(
        usable_processors(), local_worker(settings, group), threads_bind(settings)
    )
    return CpuPlatform(kernels, settings.gpu_memory_utilization, num_sharers)


def _reasons_for_the_cpu(settings: WorkerSettings) -> list[str]:
    reasons = []
    if settings.pipeline_parallel_size > 1:
        reasons.append(("pipeline stages are supported", "--pipeline-parallel-size 1"))
    if settings.quantization is not QuantizationSetting.AUTO:
        reasons.append(("quantization of weights at load is supported", "--quantization auto"))
    if settings.kv_cache_dtype is not KVCacheDtype.AUTO:
        reasons.append(("a KV cache in 8 bits is supported", "--kv-cache-dtype auto"))
    return [f"{what} only on the CPU; set --device cpu, or {flag}" for what, flag in reasons]


def local_worker(settings: WorkerSettings, group: Group | None) -> LocalWorker:
    """Returns this worker's number among the workers of this machine, from its replica's number on
    the machine and its rank. The ranks of a replica have successive numbers. Raises SettingError if
    the replica's number is not below the number of replicas.
    """
    if settings.local_replica >= settings.num_local_replicas:
        raise SettingError(
            f"--local-replica {settings.local_replica} must be below --num-local-replicas "
            f"{settings.num_local_replicas}"
        )
    ranks = [0] if group is None else group.local_ranks
    rank = 0 if group is None else group.membership.rank
    index = settings.local_replica * len(ranks) + ranks.index(rank)
    return LocalWorker(index, settings.num_local_replicas * len(ranks))


def threads_bind(settings: WorkerSettings) -> str:
    """Returns the rule by which threads are bound to processors (see `placement`). By default
    threads of a worker that may use CUDA are not bound.
    """
    bind = settings.cpu_omp_threads_bind
    may_be_cuda = settings.device is not DeviceSetting.CPU and torch.cuda.is_available()
    return BIND_NONE if bind == BIND_AUTO and may_be_cuda else bind


def is_batch_invariant(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether a request's results must not depend on the other requests of its steps. By default
    this is true on the CPU and false on CUDA.
    """
    if settings.batch_invariant is None:
        return device.type == CPU.type
    return settings.batch_invariant


def _cuda_platform(settings: WorkerSettings, group: Group | None) -> CudaPlatform:
    if group is not None and settings.batch_invariant:
        raise UnsuitableDevice(
            "batch_invariant is supported only with one GPU, because NCCL's order of additions "
            "depends on the size of the sum; unset batch_invariant, or set --tensor-parallel-size 1"
        )
    try:
        return CudaPlatform(
            settings.gpu_memory_utilization,
            batch_invariant=settings.batch_invariant is True,
            num_sharers=settings.num_local_replicas,
        )
    except RuntimeError as error:  # such as a GPU that another process uses exclusively
        line = (str(error).splitlines() or [""])[0]
        raise UnsuitableDevice(
            f"the GPU cannot be used: {line}; free it, or set --device cpu"
        ) from error
