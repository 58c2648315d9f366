"""What is computed on CUDA with --batch-invariant: the same bits whatever is computed with it."""

import pytest
import torch

from benchmarks.gpu.attention_check import Case
from benchmarks.gpu.invariance_check import InvarianceCheck, products_differ
from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear
from services.worker.backends.device import CpuDevice
from tests.worker.interpreted.interpreted_ops import AnywhereSplitK, WideCpu


@pytest.mark.parametrize("bias", [False, True])
def test_products(bias: bool) -> None:
    torch.manual_seed(0)
    assert products_differ(CpuDevice(), torch.float32, 96, 200, bias=bias) == []
    weight, offsets, rows = torch.randn(200, 96), torch.randn(200), torch.randn(70, 96)
    linear = FixedTilesLinear(weight, offsets if bias else None)
    expected = torch.nn.functional.linear(rows, weight, offsets if bias else None)
    torch.testing.assert_close(linear(rows), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear.full(rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case(16, 4, 2, 32, dtype=torch.float32),
        Case(64, 4, 1, 16),
        Case(16, 4, 2, 32, window=20, dtype=torch.float32),
    ],
    ids=str,
)
def test_attention(case: Case) -> None:
    check = InvarianceCheck(case, WideCpu(), [1, 37, 150], AnywhereSplitK)
    assert check.differing([[(2, 0, 150)], [(1, 0, 37)], [(0, 0, 1)]]) == []
    cuts = [
        [(1, 0, 20), (2, 0, 7)],
        [(1, 20, 21), (2, 7, 8)],
        [(0, 0, 1), (1, 21, 37), (2, 8, 149)],
        [(2, 149, 150)],
    ]
    assert check.differing(cuts) == []


def test_without_the_mode_the_number_of_lanes_decides_how_keys_are_split() -> None:
    """So that the comparison above says something: parts are of 256 keys here."""
    case = Case(64, 2, 1, 16, dtype=torch.float32)
    check = InvarianceCheck(
        case, WideCpu(), [260], AnywhereSplitK, max_model_len=512, batch_invariant=False
    )
    assert check.differing([[(0, 0, 259)], [(0, 259, 260)]]) == [(0, 259)]
