"""Devices that store tensors, and copies between devices and the host.

The host runs ahead of a CUDA device: it queues work without waiting for results. Uploads and
downloads are queued after the device's current work. No other operation between two steps may wait
for the device.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from services.common.errors import StepwellError

Array = np.ndarray[Any, np.dtype[Any]]


class UnsuitableDevice(StepwellError):
    """The device or its software cannot run the model. The message names a remedy."""

    reason = "UNSUITABLE_DEVICE"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a data type as in config.json, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


class Download(Protocol):
    """An array that is being copied to the host."""

    def wait(self) -> Array:
        """Waits for the array and returns it. Callable from any thread, and repeatedly."""


class Device(Protocol):
    torch_device: torch.device
    num_processors: int
    """Number of independent processors that can compute parts of attention."""

    def upload(self, array: Array) -> torch.Tensor:
        """Returns the array as a tensor on the device. The tensor may share the array's memory."""

    def download(self, tensor: torch.Tensor) -> Download:
        """Starts copying a tensor to the host."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Returns a function that repeats `work`. `work` must use the same memory in every call,
        and must never wait for the device. A call overwrites the result of the previous call.
        """


class _FinishedDownload:
    def __init__(self, array: Array) -> None:
        self._array = array

    def wait(self) -> Array:
        return self._array


class CpuDevice:
    torch_device = torch.device("cpu")
    num_processors = 1

    def upload(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> Download:
        """Copies the tensor, because the next step may overwrite it."""
        return _FinishedDownload(tensor.clone().numpy())

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return work
