"""xFormers' split-K operator for tensors of the CPU."""

import torch
from xformers.ops.fmha import triton_splitk

from services.worker.backends.device import CpuDevice


class AnywhereSplitK(triton_splitk.FwOp):
    """The operator as it is, for tensors of the CPU too: the caller knows what it does."""

    SUPPORTED_DEVICES = frozenset({"cpu"})
    SUPPORTED_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})

    @classmethod
    def not_supported_reasons(cls, d) -> list[str]:
        """All but that bfloat16 wants a GPU."""
        return [reason for reason in super().not_supported_reasons(d) if "bf16" not in reason]


class WideCpu(CpuDevice):
    """A CPU that attention is spread over as over a small GPU's multiprocessors."""

    num_processors = 8
