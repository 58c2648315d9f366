"""Projections divided over two ranks give each of them the whole result."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.kernels import Linear
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.parallel.ranks import GatheredLinear, SummedLinear
from tests.worker.rank_threads import RankThread, on_ranks


def drawn(*shape: int) -> torch.Tensor:
    """Whole numbers, of which no sum here is rounded in bfloat16."""
    return torch.randint(-3, 4, shape, dtype=torch.bfloat16)


def gathered(thread: RankThread, weight: torch.Tensor) -> tuple[Linear, slice]:
    part = TorchKernels().linear(weight.chunk(2)[thread.group.ranks.rank].clone(), None)
    return GatheredLinear(part, thread.group.ranks), slice(None)


def summed(thread: RankThread, weight: torch.Tensor) -> tuple[Linear, slice]:
    ranks, half = thread.group.ranks, weight.shape[1] // 2
    own = slice(ranks.rank * half, (ranks.rank + 1) * half)
    return SummedLinear(TorchKernels().linear(weight[:, own].clone(), None), ranks), own


@pytest.mark.parametrize("divided", [gathered, summed])
def test_parts_make_the_whole(
    divided: Callable[[RankThread, torch.Tensor], tuple[Linear, slice]],
) -> None:
    torch.manual_seed(0)
    weight, x = drawn(6, 8), drawn(4, 8)

    def work(thread: RankThread) -> tuple[torch.Tensor, torch.Tensor]:
        linear, columns = divided(thread, weight)
        own = x[:, columns].contiguous()
        return linear(own), linear.full(own)

    expected = F.linear(x.float(), weight.float())
    for rounded, full in on_ranks(2, work):
        assert (rounded.dtype, full.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(full, expected)
        assert torch.equal(rounded, expected.to(torch.bfloat16))
