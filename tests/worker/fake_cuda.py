"""A device without memory, in place of CUDA. It shows when the host would wait for the device.

Its tensors are on torch's device meta: they have a shape and a data type, but no data. An error is
raised for results that the host reads, for shapes that depend on values, for operations over
tensors of several devices, and for copies that wait. Triton's kernels are not run, but their grids
are checked.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.worker.backends.device import Array

META = torch.device("meta")
MOST_GRID = (2**31 - 1, 65535, 65535)
"""CUDA's limits on the dimensions of a grid."""


class Waits(AssertionError):
    """The host would wait for the device, or a graph would contain a copy from the host."""


class QueuedOnly(TorchDispatchMode):
    """Raises Waits for copies between host and device that are not queued. Copies of scalars are
    queued, unless they are copies of their own.
    """

    is_recording = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        is_copy = "non_blocking" in names
        leaves = tree_leaves((args, kwargs)), tree_leaves(result)
        tensors = [
            x
            for x in (*leaves[0], *leaves[1])
            if isinstance(x, torch.Tensor) and (is_copy or x.dim() or x.device.type != "cpu")
        ]
        is_queued = given.get("non_blocking", False) and not self.is_recording
        if len({x.device.type for x in tensors}) > 1 and not is_queued:
            raise Waits(f"{func} copies between host and device")
        return result


class NoCode:
    """A Triton kernel that is not run. Its grid is checked."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        size = grid({"BLOCK_M": 16}) if callable(grid) else grid
        assert all(0 < n <= most for n, most in zip(size, MOST_GRID, strict=False)), size
        return lambda *_, **__: None


class Zeros:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tensor.shape, str(tensor.dtype).removeprefix("torch.")

    def wait(self) -> Array:
        return np.zeros(self._shape, self._dtype)


class FakeCuda:
    """A Device without memory. Downloads are zeros."""

    torch_device = META
    num_processors = 8

    def __init__(self, mode: QueuedOnly) -> None:
        self._mode = mode

    def upload(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(META, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Zeros:
        return Zeros(tensor)

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        self._mode.is_recording = True
        result = work()
        self._mode.is_recording = False
        return lambda: result


def split_k_without_code(monkeypatch: pytest.MonkeyPatch) -> Any:
    """xFormers' operator as on a Hopper GPU, without its kernels."""
    pytest.importorskip("xformers")
    from xformers.ops.fmha import attn_bias  # noqa: PLC0415

    with warnings.catch_warnings():  # of Triton, about xFormers
        warnings.simplefilter("ignore", DeprecationWarning)
        from xformers.ops.fmha._triton import splitk_kernels  # noqa: PLC0415

    from services.worker.backends.cuda import fixed_tiles  # noqa: PLC0415
    from tests.worker.interpreted.interpreted_ops import AnywhereSplitK  # noqa: PLC0415

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fixed_tiles, "_multiply_tile", NoCode())
    monkeypatch.setattr(splitk_kernels, "_splitK_reduce", NoCode())

    def queued(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    monkeypatch.setattr(attn_bias, "_to_device_tensor", queued)  # which pins memory

    class WithoutCode(AnywhereSplitK):
        SUPPORTED_DEVICES = frozenset({"meta"})

        @classmethod
        def get_kernel(cls) -> NoCode:
            return NoCode()

    return WithoutCode
