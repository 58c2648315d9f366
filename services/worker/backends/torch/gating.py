"""Gates of an MLP: the activation of each gate is multiplied by the gate's value."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.choices import Activation
from services.worker.backends.kernels import Linear
from services.worker.backends.lora import Delta

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715

_ALL_TRIED_BYTES = 2
_OF_TORCH: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


@dataclass(eq=False)
class GatedLinear:
    """A projection with gates applied. `batch_invariant`: see `gated`."""

    projection: Linear
    activation: Activation
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        self.out_features = self.projection.out_features // 2

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        product = self.projection(x, delta)
        return gated(product, self.activation, batch_invariant=self.batch_invariant)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result in float32. torch has already rounded it to the input's data type."""
        return self(x).float()


def gated(
    product: torch.Tensor, activation: Activation, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Maps gates [n, d], concatenated with values [n, d], to activation(gate) * value.

    On the CPU, torch's SiLU and GELU compute the last elements of each thread's part with a
    different exponential function. With `batch_invariant`, torch's operation is used only if both
    functions agree for all numbers of the data type. Otherwise other operations compute all
    elements in the same way.
    """
    gate, value = product.chunk(2, dim=-1)
    if not batch_invariant or _is_uniform(activation, product.dtype):
        return _OF_TORCH[activation](gate).mul_(value)
    gate, value = gate.float(), value.float()
    match activation:
        case Activation.SILU:
            activated = gate / torch.neg(gate).exp_().add_(1)
        case Activation.GELU_TANH:
            inner = torch.mul(gate, gate).mul_(gate).mul_(_GELU_CUBIC).add_(gate)
            activated = inner.mul_(_GELU_SCALE).tanh_().add_(1).mul_(gate).mul_(0.5)
    return activated.mul_(value).to(product.dtype)


@functools.cache
def _is_uniform(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether torch's operation returns the same result for an element at any position. Compares
    all numbers of the data type computed together with each number computed alone, as at the end of
    a thread's part.
    """
    if dtype.itemsize != _ALL_TRIED_BYTES:
        return False
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    apart = numbers.repeat_interleave(2)[::2]
    together, alone = (_OF_TORCH[activation](x) for x in (numbers, apart))
    return torch.equal(together.nan_to_num(), alone.nan_to_num())
