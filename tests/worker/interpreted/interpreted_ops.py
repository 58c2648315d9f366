"""xFormers' split-K attention operator for tensors on the CPU."""

import torch
from xformers.ops.fmha import triton_splitk

from services.worker.backends.device import CpuDevice


class AnywhereSplitK(triton_splitk.FwOp):
    """The unchanged operator without the restriction to CUDA tensors."""

    SUPPORTED_DEVICES = frozenset({"cpu"})
    SUPPORTED_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})

    @classmethod
    def not_supported_reasons(cls, d) -> list[str]:
        return [reason for reason in super().not_supported_reasons(d) if "bf16" not in reason]


class WideCpu(CpuDevice):
    """Divides attention as on the multiprocessors of a small GPU."""

    num_processors = 8
