"""The choice of kernels, made once when a worker starts."""

import enum
import logging
from collections.abc import Callable
from pathlib import Path

from services.common.errors import StepwellError
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import NotCompiled, load_compiled
from services.worker.backends.native.kernels import NativeKernels
from services.worker.backends.torch.kernels import TorchKernels

logger = logging.getLogger(__name__)


class KernelsUnavailable(StepwellError):
    """Compiled kernels were asked for by name, and there are none here."""

    reason = "KERNELS_UNAVAILABLE"


class KernelsSetting(enum.Enum):
    """Which operations a worker computes with."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


def select_kernels(
    setting: KernelsSetting, cache: Path, checkpoint_reached: Callable[[], None]
) -> Kernels:
    """The kernels that the setting asks for; auto: compiled ones, or torch's where there are none.

    Says which, and why. Raises KernelsUnavailable where compiled ones were asked for by name.
    """
    if setting is KernelsSetting.TORCH:
        logger.info("kernels: torch, as asked for")
        return TorchKernels()
    try:
        kernels = NativeKernels(load_compiled(cache, checkpoint_reached))
    except NotCompiled as error:
        if setting is KernelsSetting.NATIVE:
            raise KernelsUnavailable(f"native kernels cannot be used: {error}") from error
        logger.warning("kernels: torch, which is slower: %s", error)
        return TorchKernels()
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernels.dtypes)
    logger.info("kernels: native, for %s", names)
    return kernels
