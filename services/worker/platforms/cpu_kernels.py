"""The choice of kernels on the CPU, made once when a worker starts."""

import logging
from collections.abc import Callable
from pathlib import Path

from services.common.errors import StepwellError
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.device import dtype_name
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import NotCompiled, load_compiled
from services.worker.backends.native.kernels import NativeKernels
from services.worker.backends.torch.kernels import TorchKernels

logger = logging.getLogger(__name__)


class KernelsUnavailable(StepwellError):
    """The setting asks for compiled kernels, and there are none for this machine."""

    reason = "KERNELS_UNAVAILABLE"


def select_kernels(
    setting: KernelsSetting,
    cache: Path,
    checkpoint_reached: Callable[[], None],
    *,
    batch_invariant: bool = True,
) -> Kernels:
    """The kernels that the setting asks for; auto: compiled ones, or torch's if there are none.

    `batch_invariant` is for torch's kernels; compiled ones always are. Logs the choice and its
    reason. Raises KernelsUnavailable if the setting is NATIVE and there are none.
    """
    mode = "batch-invariant" if batch_invariant else "not batch-invariant"
    if setting is KernelsSetting.TORCH:
        logger.info("kernels: torch, %s, as asked for", mode)
        return TorchKernels(batch_invariant=batch_invariant)
    try:
        library = load_compiled(cache, checkpoint_reached)
        kernels = NativeKernels(library, batch_invariant=batch_invariant)
    except NotCompiled as error:
        if setting is KernelsSetting.NATIVE:
            raise KernelsUnavailable(f"native kernels cannot be used: {error}") from error
        logger.warning("kernels: torch, %s, which is slower: %s", mode, error)
        return TorchKernels(batch_invariant=batch_invariant)
    names = ", ".join(map(dtype_name, kernels.dtypes))
    logger.info("kernels: native, for %s", names)
    return kernels
