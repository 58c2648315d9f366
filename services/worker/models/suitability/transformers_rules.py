"""Rules for architectures without native code, from config.json and transformers' source files.

transformers is not imported, because it imports torch, which takes seconds. The class of an
architecture is looked up in the package's tables of names. The source of the class's module is
searched for the kind of attention that it uses. Problems that appear only in a computation are
found later, by `services.worker.models.from_transformers.probe`.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.worker.models.errors import UnsupportedModel, quantized
from services.worker.models.layer_config import FULL, SLIDING

RECURRENT = "linear_attention"
BOTH = "hybrid"
"""Layer types in addition to FULL and SLIDING: recurrent, or both recurrent and attention."""

OTHER_INPUTS = ("vision_config", "audio_config")
_LATENT_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys of config.json for DeepSeek's attention: two widths of keys, and the width of values."""
CONFIG_KEYS = (
    *("alibi", "architectures", "auto_map", "is_encoder_decoder", "layer_types", "model_type"),
    *("quantization_config", "rope_parameters", "rope_scaling", "vocab_size"),
    *(*_LATENT_KEYS, *OTHER_INPUTS),
)
"""The keys of config.json that these rules read."""

_SHIFTING_ROPES = frozenset({"dynamic", "longrope", "su"})
_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_SINKS = re.compile(r"self\.sinks = nn\.Parameter\(.*\)$", re.MULTILINE)
"""Attention sinks as an unconditional parameter of every layer."""
_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_decoder(values: Mapping[str, Any], path: Path) -> None:
    """Raises UnsupportedModel if an architecture is not a decoder, or cannot be served over a paged
    KV cache. `values` has the keys of config.json, whose path is `path`.
    """
    name = _check_known(values, path)
    _check_inputs(values, path, name, "; a checkpoint with only its decoder may be supported")
    if name not in _names(_tables().get(_DECODERS, {}).get(values["model_type"])):
        raise UnsupportedModel(path, f"architecture {name} is not a decoder that can be served")
    if values.get("is_encoder_decoder"):
        raise UnsupportedModel(path, f"architecture {name} has an encoder")
    if values.get("quantization_config") is not None:
        raise quantized(path, values["quantization_config"])
    _check_layers(values, path, name)
    reason = _why_not(values, _source_of(values["model_type"], name))
    if reason is not None:
        raise UnsupportedModel(path, f"{name} {reason}, and has no native code in Stepwell")


def check_whole(values: Mapping[str, Any], path: Path) -> None:
    """Raises UnsupportedModel if the hidden states of an architecture cannot be pooled."""
    name = _check_known(values, path)
    if values.get("is_encoder_decoder"):
        raise UnsupportedModel(
            path,
            f"architecture {name} has a decoder in addition to its encoder, which is not supported",
        )
    _check_inputs(values, path, name, "")
    if values.get("vocab_size") is None:
        raise UnsupportedModel(
            path, f"architecture {name} does not process text: vocab_size is missing"
        )
    if values.get("quantization_config") is not None:
        raise quantized(path, values["quantization_config"])


def _check_known(values: Mapping[str, Any], path: Path) -> str:
    """Returns the architecture's name. Raises UnsupportedModel if transformers lacks it."""
    name = str((values.get("architectures") or ["of no name"])[0])
    if find_spec("transformers") is None:
        raise UnsupportedModel(
            path,
            f"architecture {name} has no native code in Stepwell, and transformers is not "
            "installed",
        )
    if values.get("model_type") is None:
        raise UnsupportedModel(
            path, f"architecture {name} has no native code in Stepwell, and model_type is missing"
        )
    known = {each for table in _tables().values() for names in table.values() for each in names}
    if name not in known:
        remote = (
            "; Stepwell never runs the code that auto_map names" if values.get("auto_map") else ""
        )
        raise UnsupportedModel(
            path,
            f"architecture {name} is unknown to Stepwell and to transformers "
            f"{version('transformers')}{remote}",
        )
    return name


def _check_inputs(values: Mapping[str, Any], path: Path, name: str, hint: str) -> None:
    for other in OTHER_INPUTS:
        if values.get(other) is not None:
            raise UnsupportedModel(
                path,
                f"architecture {name} processes more than text ({other}), and is not "
                f"supported{hint}",
            )


def _check_layers(values: Mapping[str, Any], path: Path, name: str) -> None:
    types = values.get("layer_types") or []
    if types and set(types) == {RECURRENT}:
        raise UnsupportedModel(path, f"architecture {name} has no attention layer")
    for index, kind in enumerate(types):
        if kind not in (FULL, SLIDING, RECURRENT, BOTH):
            raise UnsupportedModel(path, f"layer {index} has type {kind!r}, which is not supported")
    ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for entry in (ropes, *(entry for entry in ropes.values() if isinstance(entry, dict))):
        kind = str(entry.get("rope_type", entry.get("type")))
        if kind in _SHIFTING_ROPES:
            problem = (
                f"rope_type {kind!r} is not supported: when a sequence grows, its cached keys "
                "would become wrong"
            )
            raise UnsupportedModel(path, problem)


def _why_not(values: Mapping[str, Any], source: str | None) -> str | None:
    """Returns why a decoder with this source file cannot be served, or None."""
    positionless, rotated, width = map(values.get, _LATENT_KEYS)
    if positionless and rotated and width and positionless + rotated != width:
        return "has values of another shape than its keys"
    if source is None or "AutoModel" in source:
        return None
    if "alibi" in source and values.get("alibi") is not False:
        return "biases its attention by distance (ALiBi), which is not supported"
    if "ALL_ATTENTION_FUNCTIONS" in source:
        has_sinks = "s_aux=" in source and _SINKS.search(source) is not None
        return "passes s_aux to attention, which is not supported" if has_sinks else None
    if _ATTENTION_CLASS.search(source) is None:
        return "has no attention layer"
    return "does not use transformers' attention interface"


def _source_of(model_type: str, name: str) -> str | None:
    models = _package() / "models"
    own = models / model_type.replace("-", "_")
    for files in (own.glob("modeling_*.py"), models.glob("*/modeling_*.py")):
        for file in sorted(files):
            text = file.read_text(encoding="utf-8")
            if f"\nclass {name}(" in text:
                return text
    return None


@cache
def _tables() -> dict[str, dict[str, tuple[str, ...]]]:
    """The tables of transformers, by name. Each maps model types to class names."""
    file = _package() / "models" / "auto" / "modeling_auto.py"
    return dict(_read_tables(ast.parse(file.read_text(encoding="utf-8"))))


def _read_tables(module: ast.Module) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
            pairs = [
                (ast.literal_eval(pair.elts[0]), _names(ast.literal_eval(pair.elts[1])))
                for pair in ast.walk(node.value)
                if isinstance(pair, ast.Tuple)
                and len(pair.elts) == 2
                and isinstance(pair.elts[0], ast.Constant)
                and not isinstance(pair.elts[1], ast.Starred | ast.Call)
            ]
            if target.id.endswith("MAPPING_NAMES"):
                yield target.id, dict(pairs)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _package() -> Path:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise AssertionError("transformers is not installed")
    return Path(spec.origin).parent
