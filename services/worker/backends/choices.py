"""Enums of compute settings, named as in the settings and in config.json. Does not import torch."""

import enum

from services.common.process.processors import cpu_list

BIND_AUTO, BIND_NONE = "auto", "nobind"


def bind_problem(value: str) -> str | None:
    """The problem of a value of `cpu_omp_threads_bind`, or None."""
    try:
        is_right = value in (BIND_AUTO, BIND_NONE) or all(map(cpu_list, value.split("|")))
    except ValueError:
        is_right = False
    return None if is_right else "must be auto, nobind or lists such as 0-31|32-63"


class DeviceSetting(enum.Enum):
    """The device of a worker. AUTO selects CUDA if possible, and the CPU otherwise. SIMULATED
    computes no model: its steps take the time that a profile says.
    """

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    SIMULATED = "simulated"


class KernelsSetting(enum.Enum):
    """The kernels of a worker on the CPU: compiled (NATIVE), torch's (TORCH), or compiled kernels
    if there are any and otherwise torch's (AUTO).
    """

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class SumOrder(enum.Enum):
    """The order in which products of bfloat16 are added. Each rounds to other bits.

    PAIRS: the second product of each pair, then the first, both added to the total (AVX-512's
    VDPBF16PS, and its order computed by other instructions). TILES: Intel AMX's. DOT_PRODUCTS:
    ARM's BFDOT, which rounds the sum of a pair once.
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
