"""Weights of fewer bits than the data type that is computed in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch

Weight = Union[torch.Tensor, "QuantizedWeight"]
"""A weight [out, in]."""

_MOST_INT8 = 127
_MOST_INT8_PRODUCTS = (2**31 - 1) // (127 * 128)
_SMALLEST_SCALED = 1e-30
"""A row whose elements are all below this magnitude is zeros."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] whose element in row n and column k is
    `codes[n, k] * scales[n, k // group] + offsets[n, k // group]`.

    `codes` [out, in], each of `bits`: int8 of 8, or of 4 for codes from -8 to 7, or
    float8_e4m3fn, without NaN. `scales` and `offsets`, unless they are None, float32 [out, groups],
    where a group is `in / groups` columns. `dtype`: in which it is computed with.
    `quantizes_inputs`: inputs are rounded to 8 bits too, see quantized_rows; the codes are int8
    of 8 bits then, and each row has one scale and no offset.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    dtype: torch.dtype
    quantizes_inputs: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if sums of products with inputs of 8 bits may not fit 32 bits."""
        columns = self.codes.shape[1]
        if self.quantizes_inputs and columns > _MOST_INT8_PRODUCTS:
            raise ValueError(f"sums over {columns} inputs of 8 bits do not fit 32 bits")

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.codes.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self) -> torch.Tensor:
        """The weight in `dtype`, to which float32 is rounded."""
        rows, columns = self.codes.shape
        grouped = self.codes.float().reshape(rows, -1, self.group) * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grouped += self.offsets.unsqueeze(-1)
        return grouped.view(rows, columns).to(self.dtype)

    def in_groups_of(self, group: int) -> "QuantizedWeight":
        """The same weight in groups of `group` columns, a divisor of the size of its groups."""
        times = self.group // group
        if times == 1:
            return self
        offsets = self.offsets
        return replace(
            self,
            scales=self.scales.repeat_interleave(times, dim=1),
            offsets=None if offsets is None else offsets.repeat_interleave(times, dim=1),
        )

    def to(self, device: torch.device) -> "QuantizedWeight":
        """On a device."""
        offsets = self.offsets
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            offsets=None if offsets is None else offsets.to(device),
        )

    def rows(self, taken: slice) -> "QuantizedWeight":
        """Some rows."""
        return replace(
            self,
            codes=self.codes[taken],
            scales=self.scales[taken],
            offsets=None if self.offsets is None else self.offsets[taken],
        )

    def columns(self, taken: slice) -> "QuantizedWeight":
        """Some columns: of a weight with several groups whole groups."""
        if self.scales.shape[1] == 1:
            return replace(self, codes=self.codes[:, taken])
        first, end, _ = taken.indices(self.shape[1])
        if first % self.group or end % self.group:
            raise ValueError(f"columns {first} to {end} are not groups of {self.group}")
        groups = slice(first // self.group, end // self.group)
        return replace(
            self,
            codes=self.codes[:, taken],
            scales=self.scales[:, groups],
            offsets=None if self.offsets is None else self.offsets[:, groups],
        )


def quantize_int8(weight: torch.Tensor, *, quantizes_inputs: bool = False) -> QuantizedWeight:
    """Rounds to 8 bits, with a scale for each row, by which its largest magnitude becomes 127.
    Raises ValueError as QuantizedWeight does.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / _MOST_INT8
    divisor = torch.where(scales == 0, 1.0, scales)
    codes = (wide / divisor).round().to(torch.int8)
    return QuantizedWeight(codes, scales, None, 8, weight.dtype, quantizes_inputs)


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] as codes [..., d] times scales [..., 1], both float32: codes are whole numbers
    from -127 to 127, and a scale is the largest magnitude of the row over 127, or NaN if the row is
    not finite. vLLM quantizes activations of a token in this way.
    """
    exact = rows.float()
    most = exact.abs().amax(-1, keepdim=True) + (exact * 0).sum(-1, keepdim=True)
    is_zero = most < _SMALLEST_SCALED
    inverse = torch.full_like(most, _MOST_INT8) / most  # `127 / most` would be rounded twice.
    codes = exact * inverse.masked_fill_(is_zero, 0)
    return codes.round_(), (most / _MOST_INT8).masked_fill_(is_zero, 0)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights of as many columns one below the other. If they have codes of several lengths, or
    groups of several sizes, the result has the longest codes, and the largest groups that divide
    all. Raises ValueError unless all are quantized, to integers or to floats, with inputs quantized
    or not, or none is.
    """
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    if len({one.codes.dtype for one in quantized}) > 1:
        raise ValueError("some are quantized to integers and some to floats")
    if len(quantized) < len(weights):
        raise ValueError("some are quantized and some are not")
    if len({one.quantizes_inputs for one in quantized}) > 1:
        raise ValueError("some are for quantized inputs and some are not")
    group = math.gcd(*(one.group for one in quantized))
    parts = [one.in_groups_of(group) for one in quantized]
    offsets = None
    if any(one.offsets is not None for one in parts):
        both = ((one.offsets, one.scales) for one in parts)
        offsets = torch.cat([torch.zeros_like(y) if x is None else x for x, y in both])
    return QuantizedWeight(
        codes=torch.cat([one.codes.view(torch.int8) for one in parts]).view(parts[0].codes.dtype),
        scales=torch.cat([one.scales for one in parts]),
        offsets=offsets,
        bits=max(one.bits for one in parts),
        dtype=parts[0].dtype,
        quantizes_inputs=parts[0].quantizes_inputs,
    )
