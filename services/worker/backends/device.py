"""Where tensors live, and how arrays of the host get there and back.

The host computes ahead of a CUDA device: uploads and downloads are queued behind what is running
there and do not wait for it, and neither may anything else between two steps.
"""

import enum
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from services.common.errors import StepwellError

Array = np.ndarray[Any, np.dtype[Any]]


class DeviceSetting(enum.Enum):
    """Which device a worker computes on; auto: CUDA where that is possible, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class UnsuitableDevice(StepwellError):
    """The device, or the software for it, cannot run the model; the message names the cure."""

    reason = "UNSUITABLE_DEVICE"


class Download(Protocol):
    """An array on its way to the host."""

    def wait(self) -> Array:
        """The array, once it is here. May be called from any thread, and again."""
        ...


class Device(Protocol):
    """One device that computes."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def num_processors(self) -> int:
        """Independent processors that attention is spread over."""
        ...

    def upload(self, array: Array) -> torch.Tensor:
        """The array as a tensor on the device; it may share the array's memory."""
        ...

    def download(self, tensor: torch.Tensor) -> Download:
        """Starts bringing a tensor to the host."""
        ...

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What repeats `work`, which reads and writes the same memory at every call and waits for
        nothing. The result lies in memory that the next call overwrites.
        """
        ...


class _Arrived:
    def __init__(self, array: Array) -> None:
        self._array = array

    def wait(self) -> Array:
        return self._array


class CpuDevice:
    """The processor and its memory."""

    torch_device = torch.device("cpu")
    num_processors = 1

    def upload(self, array: Array) -> torch.Tensor:
        """Shares the array's memory."""
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> Download:
        """A copy, since what computes next may overwrite the tensor."""
        return _Arrived(tensor.clone().numpy())

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`work` itself."""
        return work
