"""Selects the kernels with which a worker on the CPU computes, once when it starts."""

import logging
from collections.abc import Callable
from pathlib import Path

from services.common.errors import StepwellError
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import NotCompiled, load_compiled
from services.worker.backends.native.kernels import NativeKernels
from services.worker.backends.torch.kernels import TorchKernels

logger = logging.getLogger(__name__)


class KernelsUnavailable(StepwellError):
    """The settings require compiled kernels, but there are none for this machine."""

    reason = "KERNELS_UNAVAILABLE"


def select_kernels(
    setting: KernelsSetting,
    cache: Path,
    checkpoint_reached: Callable[[], None],
    *,
    batch_invariant: bool = True,
) -> Kernels:
    """Selects the kernels for the setting. AUTO selects compiled kernels if there are any,
    otherwise torch's kernels.

    `batch_invariant` affects only torch's kernels, because compiled kernels are always
    batch-invariant. Logs the choice and its reason. Raises KernelsUnavailable if the setting is
    NATIVE and there are no compiled kernels.
    """
    torch_kernels = TorchKernels(batch_invariant=batch_invariant)
    if setting is KernelsSetting.TORCH:
        logger.info("kernels: %s, as set by --kernels", torch_kernels.description)
        return torch_kernels
    try:
        library = load_compiled(cache, checkpoint_reached)
        kernels = NativeKernels(library)
    except NotCompiled as error:
        if setting is KernelsSetting.NATIVE:
            raise KernelsUnavailable(f"native kernels cannot be used: {error}") from error
        logger.warning(
            "kernels: %s, which are slower than native kernels: %s",
            torch_kernels.description,
            error,
        )
        return torch_kernels
    logger.info("kernels: %s", kernels.description)
    return kernels
