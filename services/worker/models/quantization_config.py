"""How the weights of a checkpoint are quantized, from `quantization_config` in config.json."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.worker.models.errors import UnsupportedModel, quantized
from services.worker.models.files.json_file import JsonReader

KEY = "quantization_config"
_FP8_BLOCK = 128


class QuantizationSetting(enum.Enum):
    """How projections that are stored unquantized are quantized while they are loaded. INT8
    quantizes weights to 8 bits. W8A8 also quantizes inputs to 8 bits, except inputs of the head.
    """

    AUTO = "auto"
    INT8 = "int8"
    W8A8 = "w8a8"


class StoredFormat(enum.Enum):
    """The storage format of a quantized weight (see quantized_tensors.py)."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACK_QUANTIZED = "pack-quantized"
    INT_QUANTIZED = "int-quantized"
    FLOAT_QUANTIZED = "float-quantized"
    FP8 = "fp8"


_COMPRESSED = {"pack-quantized", "int-quantized", "float-quantized"}
"""Formats of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the projections of a checkpoint are quantized."""

    format: StoredFormat
    bits: int
    group_size: int | None
    """The number of input features that share a scale, or None if all of them do. In FP8 formats
    with blocks, the scale is also shared by as many output features.
    """
    zero_points: bool
    ignored: tuple[str, ...]
    """Projections that are not quantized. An entry is a name, or `re:` followed by a regular
    expression that matches the beginning of a name. For AWQ, an entry may be any part of a name.
    """
    quantizes_head: bool
    has_input_scales: bool = False
    """Whether the checkpoint has scales for inputs, which are ignored."""
    quantizes_inputs: bool = False
    """Whether inputs are quantized to 8 bits, with a scale for each token."""

    def quantizes(self, module: str) -> bool:
        if module == "lm_head" and not self.quantizes_head:
            return False
        if self.format is StoredFormat.AWQ:
            return not any(part in module for part in self.ignored)
        patterns = [name.removeprefix("re:") for name in self.ignored if name.startswith("re:")]
        return module not in self.ignored and not any(re.match(x, module) for x in patterns)


def read_quantization(config: JsonReader) -> QuantizationConfig | None:
    """Returns the quantization that config.json describes, or None if the weights are not
    quantized. Raises UnsupportedModel for an unsupported quantization, and ModelConfigError for a
    wrong value.
    """
    if KEY not in config:
        return None
    reader = config.nested(KEY)
    match reader.raw("quant_method"):
        case "gptq":
            return _read_gptq(reader)
        case "awq":
            return _read_awq(reader)
        case "compressed-tensors":
            return _read_compressed_tensors(reader)
        case "fp8":
            return _read_fp8(reader)
    raise quantized(config.path, config.raw(KEY))


def _read_gptq(reader: JsonReader) -> QuantizationConfig:
    bits = _among(reader, "bits", (4, 8))
    if not reader.boolean("sym", True):
        raise _refused(reader, "sym false: zero points of GPTQ are not supported")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if reader.raw(key):
            raise _refused(
                reader, f"{key}: different quantization of some projections is not supported"
            )
    group, has_head = _group_size(reader, "group_size"), reader.boolean("lm_head", False)
    return QuantizationConfig(StoredFormat.GPTQ, bits, group, False, (), has_head)


def _read_awq(reader: JsonReader) -> QuantizationConfig:
    _among(reader, "bits" if "bits" in reader else "w_bit", (4,))
    version = str(reader.raw("version") or "gemm").lower()
    if version != "gemm":
        raise _refused(reader, f"version is {version!r}, but only gemm is supported")
    if not reader.boolean("zero_point", True):
        raise _refused(reader, "zero_point false: AWQ without zero points is not supported")
    group = _group_size(reader, "group_size" if "group_size" in reader else "q_group_size")
    ignored = _texts(reader, "modules_to_not_convert")
    return QuantizationConfig(StoredFormat.AWQ, 4, group, True, ignored, False)


def _read_fp8(reader: JsonReader) -> QuantizationConfig:
    if (form := reader.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused(reader, f"fmt is {form!r}, but only e4m3 is supported")
    scheme = reader.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refused(reader, f"activation_scheme {scheme!r} is not supported")
    block = reader.raw("weight_block_size")
    if block not in (None, [_FP8_BLOCK] * 2):
        raise _refused(
            reader, f"weight_block_size is {block!r}, but only {[_FP8_BLOCK] * 2} is supported"
        )
    ignored = (*_texts(reader, "ignored_layers"), *_texts(reader, "modules_to_not_convert"))
    group, is_static = None if block is None else _FP8_BLOCK, scheme == "static"
    return QuantizationConfig(StoredFormat.FP8, 8, group, False, ignored, False, is_static)


def _read_compressed_tensors(reader: JsonReader) -> QuantizationConfig:
    groups = reader.nested("config_groups")
    names = list(reader.raw("config_groups") or {})
    if len(names) != 1:
        raise _refused(reader, f"config_groups: has {len(names)} groups, but only one is supported")
    group = groups.nested(names[0])
    if group.raw("targets") != ["Linear"]:
        raise _refused(
            group, f"targets is {group.raw('targets')!r}, but only ['Linear'] is supported"
        )
    if reader.raw("kv_cache_scheme"):
        raise _refused(reader, "kv_cache_scheme is not supported")
    if (sparsity := reader.nested("sparsity_config").text("format", "dense")) != "dense":
        raise _refused(
            reader, f"sparsity_config: format is {sparsity!r}, but only dense is supported"
        )
    stored = str(group.raw("format") or reader.raw("format"))
    if stored not in _COMPRESSED:
        raise _refused(reader, f"format {stored!r} is not supported")
    weights, of_format = group.nested("weights"), StoredFormat(stored)
    packed = of_format is StoredFormat.PACK_QUANTIZED
    bits = _among(weights, "num_bits", (4, 8) if packed else (8,))
    kind = "float" if of_format is StoredFormat.FLOAT_QUANTIZED else "int"
    if weights.text("type", "int") != kind:
        raise _refused(
            weights, f"type is {weights.text('type', 'int')!r}, but only {kind} is supported"
        )
    strategy = weights.text("strategy", "channel")
    if strategy not in ({"group", "channel"} if packed else {"channel"}):
        raise _refused(weights, f"strategy {strategy!r} is not supported with {stored}")
    if weights.raw("actorder") not in (None, False, "weight", "static"):
        raise _refused(
            weights, f"actorder {weights.raw('actorder')!r}: reordered columns are not supported"
        )
    symmetric = weights.boolean("symmetric", True)
    if not (symmetric or packed):
        raise _refused(weights, f"symmetric false is not supported with {stored}")
    activations = group.nested("input_activations")
    return QuantizationConfig(
        of_format,
        bits,
        weights.integer("group_size") if strategy == "group" else None,
        zero_points=not symmetric,
        ignored=_texts(reader, "ignore"),
        quantizes_head=True,
        has_input_scales=activations.raw("dynamic") is False,
        quantizes_inputs=of_format is StoredFormat.INT_QUANTIZED and _is_w8a8(activations),
    )


def _is_w8a8(activations: JsonReader) -> bool:
    """Whether inputs are quantized to int8 at run time, with a scale for each token."""
    return (
        activations.raw("dynamic") is True
        and activations.raw("strategy") == "token"
        and activations.integer("num_bits", 8) == 8
        and activations.text("type", "int") == "int"
        and activations.boolean("symmetric", True)
    )


def _group_size(reader: JsonReader, key: str) -> int | None:
    return None if reader.raw(key) == -1 else reader.integer(key)


def _among(reader: JsonReader, key: str, known: Sequence[int]) -> int:
    value = reader.integer(key)
    if value not in known:
        raise _refused(
            reader, f"{key} is {value}, but only {' and '.join(map(str, known))} are supported"
        )
    return value


def _texts(reader: JsonReader, key: str) -> tuple[str, ...]:
    values: Any = reader.raw(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise reader.error(key, f"must be a list of names, not {values!r}")
    for pattern in (value.removeprefix("re:") for value in values if value.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"has {pattern!r}, which is not a regular expression: {error}"
            raise reader.error(key, problem) from error
    return tuple(values)


def _refused(reader: JsonReader, problem: str) -> UnsupportedModel:
    return UnsupportedModel(reader.path, f"{KEY}: {problem}")
