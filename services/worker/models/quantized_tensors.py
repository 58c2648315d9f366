"""Decodes the tensors of quantized weights in checkpoints.

FP8 weights [out, in] are floats times scales. A weight of GPTQ, AWQ or compressed-tensors is
`(code - zero point) * scale`, with a zero point and a scale for each output feature and group of
input features. GPTQ, AWQ and pack-quantized checkpoints pack codes into words of 32 bits.
"""

import torch

from services.worker.backends.quantized import QuantizedWeight
from services.worker.models.quantization_config import QuantizationConfig, StoredFormat

WORD_BITS = 32
CODES = frozenset({"I8", "I32", "I64", "F8_E4M3"})
"""Data types of tensors with codes, zero points or shapes. Scales have other data types."""
_CODES_IN = dict.fromkeys(
    ("qweight", "qzeros", "weight_packed", "weight_zero_point", "g_idx"), torch.int32
)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight consecutive output features, the position of its code in a word of AWQ."""

Tensors = dict[str, torch.Tensor]


def tensor_shapes(config: QuantizationConfig, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that store one weight, by the last part of their names.
    Raises ValueError if the weight's dimensions are not multiples of the group size and of the
    number of codes in a word.
    """
    rows, columns = shape
    in_word = WORD_BITS // config.bits
    group = config.group_size or columns
    groups = columns // group
    packs_columns = config.format is StoredFormat.GPTQ
    packs_rows = packs_columns or config.format is StoredFormat.AWQ
    if columns % group or (packs_columns and columns % in_word) or (packs_rows and rows % in_word):
        raise ValueError(
            f"shape {list(shape)} cannot be divided into groups of {group} columns and into packed "
            "words"
        )
    match config.format:
        case StoredFormat.GPTQ:
            found = {"qweight": (columns // in_word, rows), "g_idx": (columns,)}
        case StoredFormat.AWQ:
            found = {"qweight": (columns, rows // in_word)}
        case StoredFormat.PACK_QUANTIZED:
            found = {"weight_packed": (rows, -(-columns // in_word)), "weight_shape": (2,)}
            found["weight_scale"] = (rows, groups)
            if config.zero_points:
                found["weight_zero_point"] = (-(-rows // in_word), groups)
        case StoredFormat.INT_QUANTIZED | StoredFormat.FLOAT_QUANTIZED:
            found = {"weight": shape, "weight_scale": (rows, 1)}
        case StoredFormat.FP8 if config.group_size is None:
            found = {"weight": shape, "weight_scale": ()}
        case StoredFormat.FP8:
            found = {"weight": shape, "weight_scale_inv": (-(-rows // group), groups)}
    if config.has_input_scales:
        found["input_scale"] = ()
    if packs_rows:
        found |= {"qzeros": (groups, rows // in_word), "scales": (groups, rows)}
    return dict(found)


def decoded(
    config: QuantizationConfig, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedWeight:
    """Decodes the tensors of `tensor_shapes`, for computations in `dtype`. Raises ValueError for
    codes of another data type, for NaN, for groups that are not consecutive input features, and for
    weights that QuantizedWeight does not support.
    """
    floats = config.format in (StoredFormat.FLOAT_QUANTIZED, StoredFormat.FP8)
    codes_in = _CODES_IN | {"weight": torch.float8_e4m3fn if floats else torch.int8}
    for name in codes_in.keys() & tensors.keys():
        if tensors[name].dtype is not codes_in[name]:
            raise ValueError(f"{name} is {tensors[name].dtype}, not {codes_in[name]}")
    match config.format:
        case StoredFormat.GPTQ:
            return _of_gptq(config, tensors, dtype)
        case StoredFormat.AWQ:
            return _of_awq(tensors, dtype)
        case StoredFormat.PACK_QUANTIZED:
            return _of_pack_quantized(config, tensors, shape, dtype)
        case StoredFormat.INT_QUANTIZED:
            codes, scales = tensors["weight"], tensors["weight_scale"].float()
            has_codes = config.quantizes_inputs
            return QuantizedWeight(codes, scales, None, config.bits, dtype, has_codes)
        case StoredFormat.FLOAT_QUANTIZED | StoredFormat.FP8:
            return _of_floats(config, tensors, dtype)


def _of_floats(config: QuantizationConfig, tensors: Tensors, dtype: torch.dtype) -> QuantizedWeight:
    """Decodes FP8 weights. Raises ValueError for NaN, which kernels would decode as a number."""
    codes = tensors["weight"]
    if codes.float().isnan().any():
        raise ValueError("it contains NaN")
    if config.group_size is None:
        scales = tensors["weight_scale"].reshape(-1, 1).expand(len(codes), 1)
    else:
        blocks = tensors["weight_scale_inv"].repeat_interleave(config.group_size, dim=0)
        scales = blocks[: len(codes)]
    return QuantizedWeight(codes, scales.float(), None, config.bits, dtype)


def _of_gptq(config: QuantizationConfig, tensors: Tensors, dtype: torch.dtype) -> QuantizedWeight:
    """Decodes symmetric GPTQ weights. Their zero points (qzeros) are the middle of the codes."""
    group_of = tensors["g_idx"].long()
    columns = torch.arange(len(group_of), device=group_of.device)
    if not torch.equal(group_of, columns // (config.group_size or len(columns))):
        raise ValueError("desc_act: reordered input features are not supported")
    codes = _unpacked(tensors["qweight"].T, config.bits) - 2 ** (config.bits - 1)
    scales = tensors["scales"].T.float()
    return QuantizedWeight(codes.to(torch.int8), scales, None, config.bits, dtype)


def _of_awq(tensors: Tensors, dtype: torch.dtype) -> QuantizedWeight:
    """Decodes AWQ weights. Codes and zero points are shifted by 8, the middle of the code range."""

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        words = _unpacked(packed, 4).view(len(packed), -1, len(_AWQ_PLACES))
        return (words[..., list(_AWQ_PLACES)].flatten(1) - 8).T

    scales = tensors["scales"].T.float()
    offsets = -scales * in_order(tensors["qzeros"])
    codes = in_order(tensors["qweight"]).to(torch.int8)
    return QuantizedWeight(codes, scales, offsets, 4, dtype)


def _of_pack_quantized(
    config: QuantizationConfig, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedWeight:
    rows, columns = shape
    middle = 2 ** (config.bits - 1)
    codes = _unpacked(tensors["weight_packed"], config.bits)[:, :columns] - middle
    scales, offsets = tensors["weight_scale"].float(), None
    if config.zero_points:
        zero_points = _unpacked(tensors["weight_zero_point"].T, config.bits)[:, :rows].T - middle
        offsets = -scales * zero_points
    return QuantizedWeight(codes.to(torch.int8), scales, offsets, config.bits, dtype)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Maps words, int32 [n, m], to unsigned codes, int32 [n, m * 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return torch.bitwise_and(words.unsqueeze(-1) >> shifts, 2**bits - 1).flatten(1)
