"""A matrix product in Triton, in which a row's result does not depend on the number of rows.

cuBLAS chooses a kernel by the number of rows, and each kernel has its own summation order. Here all
products use tiles of one size, and one program sums each tile in a fixed order along the inner
dimension. The method is from Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference".
"""

import torch
import triton
import triton.language as tl

from services.worker.backends.lora import Delta

_ROWS, _COLUMNS, _INNER = 64, 128, 64
_WARPS, _STAGES = 4, 3


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_tile(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    output,
    num_rows,
    num_columns,
    inner,
    x_stride,
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    INNER: tl.constexpr,  # noqa: N803
):
    """Computes one tile of x W^T, for x [num_rows, inner] and a weight W [num_columns, inner].
    Tiles of the same columns are computed one after the other, so that their weights are read from
    a cache.
    """
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0)
    rows = (tile % num_row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tile // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, INNER)
    x_addresses = x + rows[:, None].to(tl.int64) * x_stride + steps[None, :]
    weight_addresses = weight + columns[None, :].to(tl.int64) * inner + steps[:, None]
    is_row, is_column = rows[:, None] < num_rows, columns[None, :] < num_columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, INNER):
        left = inner - begin
        left_tile = tl.load(x_addresses + begin, mask=is_row & (steps[None, :] < left), other=0.0)
        right_tile = tl.load(
            weight_addresses + begin, mask=is_column & (steps[:, None] < left), other=0.0
        )
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0)[None, :]
    addresses = output + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(addresses, total.to(output.dtype.element_ty), mask=is_row & is_column)


class FixedTilesLinear:
    """A Linear for any number of rows: x W^T + b. The bias is [out] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        product = self._product(x, x.dtype)
        return product if delta is None else delta.added_to(product, x)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, torch.float32)

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_rows = len(x)
        output = torch.empty(num_rows, self.out_features, dtype=dtype, device=x.device)
        tiles = triton.cdiv(num_rows, _ROWS) * triton.cdiv(self.out_features, _COLUMNS)
        _multiply_tile[(tiles,)](
            x,
            self._weight,
            self._weight if self._bias is None else self._bias,
            output,
            num_rows,
            self.out_features,
            self.in_features,
            x.stride(0),
            HAS_BIAS=self._bias is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            INNER=_INNER,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
        return output
