"""Multiplication by a fixed weight, packed for the processor if possible.

In a batch-invariant product, the bits of a row do not depend on the other rows. The libraries that
torch uses sum a single row in another order than many. With four or more rows, the order hardly
ever differs. (Of 15 weights in two data types, it differed for one weight with oneDNN 3, and only
if the processor lacked bfloat16.) Therefore rows are padded to at least four. When a weight is
packed, its products with several numbers of rows are compared. If a row's result depends on the
number of rows, the weight is multiplied in tiles of equal height.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.lora import Delta
from services.worker.backends.quantized import QuantizedWeight, quantized_rows

logger = logging.getLogger(__name__)

_BUCKETS = ((32, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""Pairs (most, multiple). A number of rows up to `most` is rounded up to the multiple."""
_FEWEST_ALIKE = 4
"""The number of rows below which the libraries sum in another order."""

_TRIED_ROWS = (4, 8, 12, 16, 32, 48, 64, 128, 256, 512)
_TILE_ROWS = 32
_EXACT_DEPTH = 1024
"""The sum of this many products of codes, each at most 127 * 128, is exact, because below 2**24."""


_agreeing: dict[tuple[object, ...], bool] = {}
"""Results of `_rows_agree` in this process. A key has all properties by which libraries choose a
multiplication method, such as the weight's shape, except the number of rows.
"""


def padded_rows(num_rows: int, *, batch_invariant: bool = True) -> int:
    """The number of rows to multiply in place of `num_rows`: one of a few numbers.

    For each number of rows, oneDNN keeps a kernel with its own buffers, which takes milliseconds
    and megabytes. Up to 1024 rows, this function returns 28 different numbers. Products that are
    not batch-invariant may also have one to three rows, which makes 31.
    """
    if num_rows < _FEWEST_ALIKE and not batch_invariant:
        return num_rows
    for most, multiple in _BUCKETS:
        if num_rows <= most:
            return -(-num_rows // multiple) * multiple
    return -(-num_rows // 128) * 128


class PackedLinear:
    """x W^T + b for a weight [out, in] and a bias [out] or None.

    On the CPU the weight is reordered once into oneDNN's blocked layout, if the library has this
    operation. It about halves the time of small batches. The caller's tensor is not kept once the
    weight is packed. The number of rows must be a result of `padded_rows`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = True,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None
        self._needs_tiles = batch_invariant and not self._rows_agree(weight.dtype)

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        product = in_tiles(self._multiply, x) if self._needs_tiles else self._multiply(x)
        return product if delta is None else delta.added_to(product, x)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32. torch has already rounded it to the input's data type."""
        return self(x).float()

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self._plain is not None
            return F.linear(x, self._plain, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product

    def _rows_agree(self, dtype: torch.dtype) -> bool:
        has_bias, is_packed = self._bias is not None, self._packed is not None
        shape = (self.out_features, self.in_features, dtype, has_bias, is_packed)
        if shape not in _agreeing:
            _agreeing[shape] = rows_agree(self._multiply, self.in_features, dtype)
            if not _agreeing[shape]:
                logger.warning(
                    "torch computes products with a weight of shape [%d, %d] differently for "
                    "different numbers of rows; so that results do not depend on the batch, they "
                    "are computed in tiles of %d rows, which is slower",
                    *(self.out_features, self.in_features, _TILE_ROWS),
                )
        return _agreeing[shape]


def rows_agree(
    multiply: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype
) -> bool:
    """Whether the product of a row has the same bits for each number of rows in _TRIED_ROWS."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(max(_TRIED_ROWS), width, generator=random).to(dtype)
    whole = multiply(rows)
    pairs = ((multiply(rows[:count]), whole[:count]) for count in _TRIED_ROWS)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


def in_tiles(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns the product of x [n, in], computed in tiles of equally many rows."""
    filled = F.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
    return torch.cat([multiply(tile) for tile in torch.split(filled, _TILE_ROWS)])[: len(x)]


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or weight.device.type != "cpu":
        return None
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    except (AttributeError, RuntimeError):
        return None
    return packed


class CodedLinear:
    """A Linear for a weight that quantizes its inputs (W8A8), for any number of rows.

    Codes are multiplied as floats, in parts of the depth whose sums are exact in float32. Therefore
    sums do not depend on their order or on the instructions. A row's result does not depend on
    other rows, and differs from the result of the compiled kernels only by the rounding of the
    bias.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._parts = [part.float().T for part in torch.split(weight.codes, _EXACT_DEPTH, dim=1)]
        self._scales = weight.scales.T
        self._bias = bias

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        product = self.full(x).to(x.dtype)
        return product if delta is None else delta.added_to(product, x)

    def full(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantized_rows(x)
        sums = torch.zeros(len(x), self.out_features, dtype=torch.int32, device=x.device)
        for part, weights in zip(torch.split(codes, _EXACT_DEPTH, 1), self._parts, strict=True):
            sums += (part @ weights).int()
        product = sums.float() * (self._scales * scales)
        return product if self._bias is None else product + self._bias
