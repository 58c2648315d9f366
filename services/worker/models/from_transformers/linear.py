"""Linear layers of a model that transformers runs, of which a rank holds a part.

Each is made from the whole layer that it replaces, without weights. `parts` are the parts of the
whole layer's tensors that it holds. Batches have any shape [..., width]; collectives get rows.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from services.worker.backends.ranks import Ranks
from services.worker.models.files.checkpoint import WHOLE

Part = tuple[slice, ...]
"""The index of a part along a tensor's first axes; empty for the whole tensor."""


class DividedLinear(nn.Linear):
    """Some rows of a whole layer: its output is a part."""

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
    """Some rows of a whole layer, as many on each rank: all ranks get the whole output."""

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole, rows)
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out of the whole layer]."""
        return _gather(self._ranks, super().forward(input))


class GatheredTiedLinear(DividedLinear):
    """A GatheredLinear that computes with its rows of a weight that is whole, being another layer's
    too.
    """

    def __init__(self, whole: nn.Linear, rows: slice, ranks: Ranks) -> None:
        super().__init__(whole)
        self._rows = rows
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[..., in] -> [..., out]."""
        bias = None if self.bias is None else self.bias[self._rows]
        return _gather(self._ranks, F.linear(input, self.weight[self._rows], bias))


class SummedLinear(DividedLinear):
    """Some columns of a whole layer: the ranks' products are summed. Its input is this rank's part;
    with `takes_part` it is whole, and the part is taken here.
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
    """Makes a norm take parts, as long on each rank, together, and give the `own` one back."""
    norm.register_forward_pre_hook(lambda _, inputs: (_gather(ranks, inputs[0]),))
    norm.register_forward_hook(lambda _norm, _inputs, output: output[..., own])


def _gather(ranks: Ranks, part: torch.Tensor) -> torch.Tensor:
    whole = ranks.gather(part.flatten(0, -2))
    return whole.view(*part.shape[:-1], whole.shape[-1])
