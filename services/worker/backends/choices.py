"""Choices between ways of computing, as settings and config.json name them. Nothing here imports
torch.
"""

import enum


class DeviceSetting(enum.Enum):
    """Which device a worker computes on; auto: CUDA if that is possible, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class KernelsSetting(enum.Enum):
    """Which operations a worker computes with."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class KVCacheDtype(enum.Enum):
    """The form in which keys and values are cached: by default as the model computes them."""

    AUTO = "auto"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"


class Activation(enum.Enum):
    """The activation of an MLP's gates, by its name in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
