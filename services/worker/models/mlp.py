"""The MLP of a layer: one gated MLP, or several with a router that picks a few for each token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.choices import Activation
from services.worker.backends.kernels import GatedMlp, Kernels, Linear, Mlp
from services.worker.backends.lora import NO_DELTAS, LayerDeltas
from services.worker.backends.torch.gating import gated


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs (experts) with a router. A token's output is the weighted sum of the outputs of
    the `num_picked` experts with the highest scores for the token.

    Tokens are grouped by expert, so that each expert is computed once. Experts that no token picks
    are not computed. A token's results are added in the order of expert numbers, independent of
    other tokens in the step. `normalized`: the picked weights are scaled to a sum of 1. Source:
    Jiang et al., Mixtral of Experts.
    """

    router: Linear
    experts: tuple[GatedMlp, ...]
    num_picked: int
    normalized: bool
    kernels: Kernels

    def __call__(
        self, hidden: torch.Tensor, num_tokens: int, deltas: LayerDeltas = NO_DELTAS
    ) -> torch.Tensor:
        weights, picked = _route(self.router(hidden), self.num_picked, normalized=self.normalized)
        output = torch.zeros_like(hidden)
        flat = picked[:num_tokens].flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        rows = order // self.num_picked
        shares = weights[:num_tokens].flatten()[order].to(hidden.dtype).unsqueeze(1)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = slice(first, first + count)
                padding = self.kernels.padded_rows(count) - count
                inputs = F.pad(hidden[rows[mine]], (0, 0, 0, padding))
                answers = expert(inputs, count)[:count]
                output.index_add_(0, rows[mine], answers * shares[mine])
                first += count
        return output


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Computes the same as Experts, with all experts in two grouped multiplications. Their shapes
    do not depend on the picked experts. Therefore the host need not wait for the device, and CUDA
    graphs may record them. The weights of experts that no token picks are not read.

    `gate_up` [num_experts, 2 * intermediate_size, hidden_size]: gates before values. `down`
    [num_experts, hidden_size, intermediate_size].
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    num_picked: int
    normalized: bool
    activation: Activation

    def __call__(
        self, hidden: torch.Tensor, num_tokens: int, deltas: LayerDeltas = NO_DELTAS
    ) -> torch.Tensor:
        weights, picked = _route(self.router(hidden), self.num_picked, normalized=self.normalized)
        picked, places = picked.sort(dim=-1)
        shares = weights.gather(1, places).to(hidden.dtype).unsqueeze(-1)
        numbers, order = picked.flatten().sort(stable=True)
        experts = torch.arange(len(self.down), device=hidden.device)
        ends = torch.searchsorted(numbers, experts, right=True, out_int32=True)
        inside = _multiplied(hidden[order // self.num_picked], self.gate_up, ends)
        answers = _multiplied(gated(inside, self.activation), self.down, ends)
        by_token = torch.empty_like(answers).index_copy_(0, order, answers)
        return (by_token.view(len(hidden), self.num_picked, -1) * shares).sum(dim=1)


def _route(
    scores: torch.Tensor, num_picked: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (float32) and numbers of the picked experts, each [n, num_picked]."""
    weights, picked = torch.softmax(scores.float(), dim=-1).topk(num_picked, dim=-1)
    if normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, picked


def _multiplied(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [n, in] by weights [num_groups, out, in]. Group i ends at row `ends[i]`."""
    product: torch.Tensor = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return product


def is_static(mlp: Mlp) -> bool:
    """Whether the MLP's operations depend only on the number of tokens, never on values."""
    return not isinstance(mlp, Experts)
