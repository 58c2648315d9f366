"""Linear layers of models that transformers runs: layers that are divided among ranks, and
batch-invariant products.

A divided layer is a rank's part of a whole layer. It is constructed, without weights, from the
layer that it replaces. `parts` are the rank's parts of the whole layer's tensors. Inputs may have
any shape [..., width].
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.pytorch_utils import Conv1D

from services.worker.backends.ranks import Ranks
from services.worker.backends.torch.packed_linear import in_tiles, rows_agree
from services.worker.models.files.checkpoint import WHOLE

logger = logging.getLogger(__name__)

Part = tuple[slice, ...]
"""The index of a part along a tensor's first axes. It is empty for the whole tensor."""


class DividedLinear(nn.Linear):
    """A layer with some rows of a whole layer. Its output is a part of the whole output."""

    def __init__(self, whole: nn.Linear, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        super().__init__(
            len(range(whole.in_features)[columns]),
            len(range(whole.out_features)[rows]),
            bias=whole.bias is not None,
            device=whole.weight.device,
            dtype=whole.weight.dtype,
        )
        self.parts: dict[str, Part] = {"weight": (rows, columns), "bias": (rows,)}
        self.multiply: Callable[..., torch.Tensor] = F.linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out], of this rank's rows and columns."""
        return self.multiply(input, self.weight, self.bias)


class GatheredLinear(DividedLinear):
    """A layer with equally many rows of a whole layer on each rank. Returns the whole output."""

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole, rows)
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out], where out is the whole layer's width."""
        return _gather(self._ranks, super().forward(input))


class GatheredTiedLinear(DividedLinear):
    """A GatheredLinear whose weight is the whole embedding's. It uses this rank's rows only."""

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole)
        self._rows = rows
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        bias = None if self.bias is None else self.bias[self._rows]
        return _gather(self._ranks, self.multiply(input, self.weight[self._rows], bias))


class SummedLinear(DividedLinear):
    """A layer with some columns of a whole layer. The products are summed over the ranks. By
    default the input is this rank's part of the whole input. With `takes_part` it is the whole
    input, and the layer selects this rank's part.
    """

    def __init__(
        self, whole: nn.Linear, columns: slice, ranks: Ranks, *, takes_part: bool = False
    ) -> None:
        super().__init__(whole, columns=columns)
        self._taken = columns if takes_part else WHOLE
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        product = self.multiply(input[..., self._taken], self.weight)
        total = self._ranks.sum(product.flatten(0, -2)).view(product.shape)
        return total if self.bias is None else total + self.bias


def multiply_alike(model: nn.Module) -> None:
    """Changes linear layers so that a row's result does not depend on the other rows, in products
    of at least four rows.

    Each shape of weight is tested, as in PackedLinear. If torch's products fail the test, layers of
    this shape compute tiles of equally many rows.
    """
    agreeing: dict[object, bool] = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        shape = (type(module), *module.weight.shape, module.weight.dtype, module.bias is not None)
        if shape not in agreeing:
            agreeing[shape] = rows_agree(*_whole_product(module), module.weight.dtype)
        if agreeing[shape]:
            continue
        if isinstance(module, DividedLinear):
            module.multiply = partial(_multiply_in_tiles, F.linear)
        else:
            module.forward = partial(_multiply_in_tiles, module.forward)  # type: ignore[method-assign]
    if failed := len(agreeing) - sum(agreeing.values()):
        logger.warning(
            "torch computes products with weights of %d of %d shapes differently for different "
            "numbers of rows; so that results do not depend on the batch, they are computed in "
            "tiles, which is slower",
            *(failed, len(agreeing)),
        )


def _whole_product(
    module: nn.Linear | Conv1D,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """Returns a layer's product before ranks exchange results, and the width of its input."""
    if isinstance(module, Conv1D):
        return module.forward, module.nx
    return partial(F.linear, weight=module.weight, bias=module.bias), module.in_features


def _multiply_in_tiles(
    multiply: Callable[..., torch.Tensor], x: torch.Tensor, *parameters: torch.Tensor | None
) -> torch.Tensor:
    product = in_tiles(lambda tile: multiply(tile, *parameters), x.flatten(0, -2))
    return product.view(*x.shape[:-1], -1)


def normalize_gathered(norm: nn.Module, own: slice, ranks: Ranks) -> None:
    """Changes a norm whose input is divided among ranks: it gathers the parts of the input, which
    have the same length on each rank, and returns the part `own` of its output.
    """
    norm.register_forward_pre_hook(lambda _, inputs: (_gather(ranks, inputs[0]),))
    norm.register_forward_hook(lambda _norm, _inputs, output: output[..., own])


def _gather(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
    whole = ranks.gather(part.flatten(0, -2))
    return whole.view(*part.shape[:-1], whole.shape[-1])
