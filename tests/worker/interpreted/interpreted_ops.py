"""xFormers' split-K operator for tensors of the CPU."""

import torch
from xformers.ops.fmha import triton_splitk

from services.worker.device import CpuDevice


class InterpretedSplitK(triton_splitk.FwOp):
    """The operator as it is, allowed where the interpreter runs it."""

    SUPPORTED_DEVICES = frozenset({"cpu"})
    SUPPORTED_DTYPES = frozenset({torch.float16, torch.float32})


class WideCpu(CpuDevice):
    """A CPU that attention is spread over as over a small GPU's multiprocessors."""

    num_processors = 8
