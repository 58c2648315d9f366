"""Weights with fewer bits than the data type of the computation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch

Weight = Union[torch.Tensor, "QuantizedWeight"]
"""A weight [out, in]."""

_MOST_INT8 = 127
_MOST_INT8_PRODUCTS = (2**31 - 1) // (127 * 128)
_SMALLEST_SCALED = 1e-30
"""A row of a matrix whose elements are all below this magnitude is quantized to zeros."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] whose element in row n and column k is `codes[n, k] * scales[n, k //
    group] + offsets[n, k // group]`.

    `codes` [out, in] have `bits` bits. Their data type is int8, with values from -8 to 7 for 4
    bits, or float8_e4m3fn without NaN. `scales`, and `offsets` if not None, are float32 [out,
    groups]. `group` is the number of columns in a group, `in / groups`. `dtype` is the data type of
    the computation. With `quantizes_inputs`, inputs are rounded to 8 bits too (see quantized_rows).
    This requires int8 codes of 8 bits, with one scale and no offset for each row.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    dtype: torch.dtype
    quantizes_inputs: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if sums of products with 8-bit inputs may exceed 32 bits."""
        columns = self.codes.shape[1]
        if self.quantizes_inputs and columns > _MOST_INT8_PRODUCTS:
            raise ValueError(
                f"sums of products with {columns} inputs of 8 bits may not fit into 32 bits"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self) -> torch.Tensor:
        """The weight in `dtype`, computed in float32 and rounded."""
        rows, columns = self.codes.shape
        grouped = self.codes.float().reshape(rows, -1, self.group) * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grouped += self.offsets.unsqueeze(-1)
        return grouped.view(rows, columns).to(self.dtype)

    def in_groups_of(self, group: int) -> "QuantizedWeight":
        """The same weight in groups of `group` columns, a divisor of the current group size."""
        times = self.group // group
        if times == 1:
            return self
        return self._mapped(self.codes, lambda scales: scales.repeat_interleave(times, dim=1))

    def to(self, device: torch.device) -> "QuantizedWeight":
        return self._mapped(self.codes.to(device), lambda scales: scales.to(device))

    def rows(self, taken: slice) -> "QuantizedWeight":
        """The weight with these rows only."""
        return self._mapped(self.codes[taken], lambda scales: scales[taken])

    def columns(self, taken: slice) -> "QuantizedWeight":
        """Returns the weight with these columns only. If a row has several groups, raises
        ValueError for columns that are not whole groups.
        """
        if self.scales.shape[1] == 1:
            return replace(self, codes=self.codes[:, taken])
        first, end, _ = taken.indices(self.shape[1])
        if first % self.group or end % self.group:
            raise ValueError(
                f"columns {first} to {end} are not whole groups of {self.group} columns"
            )
        groups = slice(first // self.group, end // self.group)
        return self._mapped(self.codes[:, taken], lambda scales: scales[:, groups])

    def _mapped(
        self, codes: torch.Tensor, of_scales: Callable[[torch.Tensor], torch.Tensor]
    ) -> "QuantizedWeight":
        offsets = None if self.offsets is None else of_scales(self.offsets)
        return replace(self, codes=codes, scales=of_scales(self.scales), offsets=offsets)


def quantize_int8(weight: torch.Tensor, *, quantizes_inputs: bool = False) -> QuantizedWeight:
    """Quantizes a weight to 8 bits. The scale of a row is the row's largest magnitude divided by
    127. Raises ValueError if the result would be an invalid QuantizedWeight.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / _MOST_INT8
    divisor = torch.where(scales == 0, 1.0, scales)
    codes = (wide / divisor).round().to(torch.int8)
    return QuantizedWeight(codes, scales, None, 8, weight.dtype, quantizes_inputs)


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows [..., d] to codes [..., d] and scales [..., 1], both float32. Codes are
    integers from -127 to 127. A scale is the largest magnitude of the row divided by 127, or NaN if
    the row is not finite. vLLM quantizes the activations of a token in this way.
    """
    exact = rows.float()
    most = exact.abs().amax(-1, keepdim=True) + (exact * 0).sum(-1, keepdim=True)
    is_zero = most < _SMALLEST_SCALED
    inverse = torch.full_like(most, _MOST_INT8) / most  # `127 / most` would round twice
    codes = exact * inverse.masked_fill_(is_zero, 0)
    return codes.round_(), (most / _MOST_INT8).masked_fill_(is_zero, 0)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Stacks weights with equal numbers of columns along their rows. The result has as many bits as
    the widest codes, and the largest group size that divides all group sizes.

    Raises ValueError if only some weights are quantized, if some are quantized to integers and some
    to floats, or if only some quantize their inputs.
    """
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    if len({one.codes.dtype for one in quantized}) > 1:
        raise ValueError("some of these weights are quantized to integers and some to floats")
    if len(quantized) < len(weights):
        raise ValueError("some of these weights are quantized and some are not")
    if len({one.quantizes_inputs for one in quantized}) > 1:
        raise ValueError("some of these weights are for quantized inputs and some are not")
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
