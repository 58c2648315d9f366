"""Enums of compute settings, named as in the settings and in config.json. Does not import torch."""

import enum

from services.common.process.processors import cpu_list

BIND_AUTO, BIND_NONE = "auto", "nobind"


def bind_problem(value: str) -> str | None:
    """Returns why a value of `cpu_omp_threads_bind` is invalid, or None if it is valid."""
    try:
        is_right = value in (BIND_AUTO, BIND_NONE) or all(map(cpu_list, value.split("|")))
    except ValueError:
        is_right = False
    return None if is_right else "must be auto, nobind or lists such as 0-31|32-63"


class DeviceSetting(enum.Enum):
    """The device of a worker. AUTO selects CUDA if possible, otherwise the CPU. With SIMULATED, no
    model is computed, and steps take the time that a profile predicts.
    """

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    SIMULATED = "simulated"


class KernelsSetting(enum.Enum):
    """The kernels of a worker on the CPU. NATIVE: compiled kernels. TORCH: torch's operations.
    AUTO: compiled kernels if they are available, otherwise torch's operations.
    """

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class SumOrder(enum.Enum):
    """The order in which products of bfloat16 are added. Sums in different orders differ in their
    last bits.

    PAIRS: of each pair of products, the second is added to the total, then the first. This is the
    order of AVX-512's VDPBF16PS, and of kernels that do the same with other instructions. TILES:
    the order of Intel AMX. DOT_PRODUCTS: the order of ARM's BFDOT, which rounds the sum of a pair
    once.
    """

    PAIRS = "pairs"
    TILES = "tiles"
    DOT_PRODUCTS = "dot products"


class KVCacheDtype(enum.Enum):
    """The data type of cached keys and values. AUTO is the data type in which they are computed."""

    AUTO = "auto"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"


class Activation(enum.Enum):
    """The activation of an MLP's gates, named as in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
