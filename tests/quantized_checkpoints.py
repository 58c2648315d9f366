"""Writes quantized models in several formats, and models with the same weights in float32."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.dequantized import HEAD, Floats, is_projection

Ints = npt.NDArray[np.int32]
Tensors = dict[str, npt.NDArray[Any]]
GROUP = 8


@dataclass(frozen=True)
class Codes:
    """A quantized weight [out, in]: unsigned codes, with scales and zero points by column group."""

    codes: Ints
    zero_points: Ints
    scales: Floats
    bits: int

    @property
    def weight(self) -> Floats:
        rows, columns = self.codes.shape
        grouped = self.codes.reshape(rows, self.scales.shape[1], -1)
        scales = self.scales[..., None].astype(np.float32)
        numbers = (grouped - self.zero_points[..., None]).astype(np.float32) * scales
        return numbers.reshape(rows, columns)


def quantized(weight: Floats, bits: int, group: int, *, symmetric: bool, scale: Any) -> Codes:
    """Quantizes a weight to `bits`, in groups of `group` columns, with scales of type `scale`."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    most = 2**bits - 1
    if symmetric:
        scales = (2 * np.abs(grouped).max(-1) / most).astype(scale)
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.int32)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = ((high - low) / most).astype(scale)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(np.int32)
    codes = np.rint(grouped / scales[..., None].astype(np.float32)) + zeros[..., None]
    codes = np.clip(codes, 0, most).astype(np.int32).reshape(rows, columns)
    return Codes(codes, zeros, scales, bits)


def packed(codes: Ints, bits: int) -> Ints:
    """Packs codes [n, m] into words [n, m * bits / 32]. The first code is in the lowest bits."""
    in_word = 32 // bits
    filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % in_word))).astype(np.int64)
    words = np.zeros((len(codes), filled.shape[1] // in_word), np.int64)
    for place in range(in_word):
        words |= filled[:, place::in_word] << (bits * place)
    return words.astype(np.uint32).view(np.int32)


def gptq(one: Codes) -> Tensors:
    """The tensors of a weight in GPTQ's format, which stores each zero point minus one."""
    columns = one.codes.shape[1]
    group = columns // one.scales.shape[1]
    return {
        "qweight": np.ascontiguousarray(packed(one.codes, one.bits).T),
        "qzeros": packed(one.zero_points.T - 1, one.bits),
        "scales": np.ascontiguousarray(one.scales.T),
        "g_idx": (np.arange(columns) // group).astype(np.int32),
    }


def awq(one: Codes) -> Tensors:
    """The tensors of a weight in AWQ's format. A word has the codes of eight output features, with
    the even features in its lower half.
    """
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def in_words(numbers: Ints) -> Ints:
        """Packs codes [k, n] into words [k, n / 8]."""
        eights = numbers.reshape(len(numbers), -1, 8)[..., order]
        return packed(eights.reshape(numbers.shape), 4)

    return {
        "qweight": in_words(np.ascontiguousarray(one.codes.T)),
        "qzeros": in_words(np.ascontiguousarray(one.zero_points.T)),
        "scales": np.ascontiguousarray(one.scales.T),
    }


def pack_quantized(one: Codes) -> Tensors:
    """The tensors of compressed-tensors, with zero points packed along the output features."""
    tensors: Tensors = {
        "weight_packed": packed(one.codes, one.bits),
        "weight_scale": one.scales,
        "weight_shape": np.array(one.codes.shape, np.int64),
    }
    if (one.zero_points != 2 ** (one.bits - 1)).any():
        zeros = packed(np.ascontiguousarray(one.zero_points.T), one.bits)
        tensors["weight_zero_point"] = np.ascontiguousarray(zeros.T)
    return tensors


def int_quantized(one: Codes) -> Tensors:
    return {"weight": (one.codes - 128).astype(np.int8), "weight_scale": one.scales}


@dataclass(frozen=True)
class Format:
    """A checkpoint format: a function from codes to tensors, and its entry in config.json."""

    tensors: Callable[[Codes], Tensors]
    config: dict[str, Any]
    bits: int = 4
    group: int | None = GROUP
    symmetric: bool = True
    scale: Any = np.float16
    ignored: tuple[str, ...] = field(default=("lm_head",))


def compressed(
    stored: str, ignored: tuple[str, ...], activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """The configuration of compressed-tensors. `activations` describes the quantization of inputs,
    and `weights` the quantization of weights.
    """
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    group["input_activations"] = activations
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


_FIRST = "model.layers.0.mlp.down_proj"
_MATCHED = "model.layers.1.self_attn.o_proj"
FORMATS = {
    "gptq": Format(gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}),
    "gptq_int8": Format(
        gptq, {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}, 8, None
    ),
    "awq": Format(
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "GEMM",
            "modules_to_not_convert": ["layers.0.mlp.down"],
        },
        symmetric=False,
        ignored=("lm_head", _FIRST),
    ),
    "pack_int4": Format(
        pack_quantized,
        compressed(
            "pack-quantized",
            ("lm_head", _FIRST, r"re:.*\.1\.self_attn\.o_proj$"),
            num_bits=4,
            strategy="group",
            group_size=GROUP,
            symmetric=True,
        ),
        ignored=("lm_head", _FIRST, _MATCHED),
    ),
    "pack_int4_asymmetric": Format(
        pack_quantized,
        compressed(
            *("pack-quantized", ()),
            **{"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
        ),
        symmetric=False,
        scale=np.float32,
        ignored=(),
    ),
    "pack_int8": Format(
        pack_quantized,
        compressed("pack-quantized", ("lm_head",), num_bits=8, strategy="channel"),
        8,
        None,
    ),
    "int8": Format(
        int_quantized,
        compressed("int-quantized", ("lm_head",), num_bits=8, strategy="channel", symmetric=True),
        8,
        None,
        scale=np.float32,
    ),
}


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = Format(
    int_quantized,
    compressed(*("int-quantized", ("lm_head",), _DYNAMIC), num_bits=8, strategy="channel")
    | {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}},
    8,
    None,
    scale=np.float32,
)


def save_quantized(directory: Path, to: Path, of: Format) -> Path:
    """Saves a copy of a model with quantized weights at `to`, and a copy with the same weights in
    float32 at `to` with the suffix .float. Returns the directory of the float32 copy.
    """
    shutil.copytree(directory, to)
    floats = to.with_suffix(".float")
    shutil.copytree(directory, floats)
    stored: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not is_projection(name) or module in of.ignored:
            stored[name] = dequantized[name] = tensor
            continue
        group = of.group or tensor.shape[1]
        codes = quantized(tensor, of.bits, group, symmetric=of.symmetric, scale=of.scale)
        dequantized[name] = codes.weight
        stored |= {f"{module}.{part}": value for part, value in of.tensors(codes).items()}
    assert (HEAD in dequantized) == (HEAD in stored or "lm_head" not in of.ignored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, floats / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": of.config}))
    return floats
