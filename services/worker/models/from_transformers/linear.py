"""Divided linear layers, each a rank's part of a layer that transformers runs.

A divided layer is constructed, without weights, from the whole layer that it replaces. `parts`: the
parts of the whole layer's tensors that the rank has. Batches may have any shape [..., width].
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from services.worker.backends.ranks import Ranks
from services.worker.models.files.checkpoint import WHOLE

Part = tuple[slice, ...]
"""The index of a part along a tensor's first axes. It is empty for the whole tensor."""


class DividedLinear(nn.Linear):
    """Some rows of a whole layer. Its output is a part of the whole output."""

    def __init__(self, whole: nn.Linear, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        super().__init__(
            len(range(whole.in_features)[columns]),
            len(range(whole.out_features)[rows]),
            bias=whole.bias is not None,
            device=whole.weight.device,
            dtype=whole.weight.dtype,
        )
        self.parts: dict[str, Part] = {"weight": (rows, columns), "bias": (rows,)}


class GatheredLinear(DividedLinear):
    """Equally many rows of a whole layer on each rank. All ranks get the whole output."""

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole, rows)
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out], where out is the whole layer's width."""
        return _gather(self._ranks, super().forward(input))


class GatheredTiedLinear(DividedLinear):
    """A GatheredLinear whose weight is whole and shared. It uses this rank's rows only."""

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole)
        self._rows = rows
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out]."""
        bias = None if self.bias is None else self.bias[self._rows]
        return _gather(self._ranks, F.linear(input, self.weight[self._rows], bias))


class SummedLinear(DividedLinear):
    """Some columns of a whole layer. The products are summed over the ranks. By default the input
    is this rank's part of the whole input. With `takes_part` it is the whole input, and the layer
    selects this rank's part.
    """

    def __init__(
        self, whole: nn.Linear, columns: slice, ranks: Ranks, *, takes_part: bool = False
    ) -> None:
        super().__init__(whole, columns=columns)
        self._taken = columns if takes_part else WHOLE
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out]."""
        product = F.linear(input[..., self._taken], self.weight)
        total = self._ranks.sum(product.flatten(0, -2)).view(product.shape)
        return total if self.bias is None else total + self.bias


def normalize_gathered(norm: nn.Module, own: slice, ranks: Ranks) -> None:
    """Changes a norm of divided inputs. It then gathers the parts of its input, which are equally
    long on each rank, and returns the part `own` of its output.
    """
    norm.register_forward_pre_hook(lambda _, inputs: (_gather(ranks, inputs[0]),))
    norm.register_forward_hook(lambda _norm, _inputs, output: output[..., own])


def _gather(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
    whole = ranks.gather(part.flatten(0, -2))
    return whole.view(*part.shape[:-1], whole.shape[-1])
