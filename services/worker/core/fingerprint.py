"""Fingerprints of models, from which block hashes are derived. Workers with equal fingerprints have
interchangeable KV blocks.

A fingerprint does not depend on the model's path, so a copy of a model has the same fingerprint.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from services.common.pool.block_hash import HASH_VERSION
from services.common.request.tokenizer_files import TOKENIZER_FILES
from services.worker.backends.choices import KVCacheDtype, SumOrder
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.files.json_file import read_json_object
from services.worker.models.files.tensor_info import TensorInfo
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.quantization_config import QuantizationSetting

WHOLE_FILE_BYTES = 64 * 2**20
"""If a model's weight files have more bytes in total, only samples of each tensor are hashed."""

_SAMPLE_BYTES = 4096
_IGNORED_CONFIG_KEYS = {"_name_or_path", "transformers_version"}


def model_fingerprint(
    checkpoint: Checkpoint,
    block_size: int,
    kv_dtype: str,
    rope_length: int = 0,
    groups: Sequence[LayerGroup] = (),
    pooling: PoolingConfig | None = None,
    quantization: QuantizationSetting = QuantizationSetting.AUTO,
    draft_model: bytes = b"",
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    *,
    bfloat16_order: SumOrder = SumOrder.PAIRS,
) -> bytes:
    """Returns a fingerprint of 32 bytes. Two are equal if and only if cached keys and values are
    interchangeable.

    `kv_dtype` is the data type of keys and values before they are cached, and `kv_cache_dtype`
    their data type in the cache. `rope_length` is the sequence length from which rotary frequencies
    are computed, or 0 if they do not depend on a length. `groups` are the KV-cache groups.
    `quantization` determines how weights that are stored unquantized are quantized. `draft_model`
    is the fingerprint of the draft model whose keys and values are in the same blocks, or empty.
    `bfloat16_order` is the order in which products of bfloat16 are added. It matters only for
    models in bfloat16.
    """
    parts = [
        *_model_parts(checkpoint),
        ("cache", f"{block_size} {kv_dtype} {rope_length} {HASH_VERSION}".encode()),
        *map(_group_part, groups),
    ]
    if pooling is not None:
        parts.append(("pooling", str(pooling).encode()))
    if quantization is not QuantizationSetting.AUTO:
        parts.append(("quantization", quantization.value.encode()))
    if draft_model:
        parts.append(("draft model", draft_model))
    if kv_cache_dtype is not KVCacheDtype.AUTO:
        parts.append(("kv_cache_dtype", kv_cache_dtype.value.encode()))
    if bfloat16_order is not SumOrder.PAIRS and kv_dtype == "bfloat16":
        parts.append(("sums", bfloat16_order.value.encode()))
    digest = sha256()
    for label, content in parts:
        for piece in (label.encode(), content):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.digest()


def _model_parts(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    config = read_json_object(checkpoint.directory / "config.json")
    kept = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    yield "config", json.dumps(kept, sort_keys=True).encode()
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        yield "tensor", f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    whole = sum(file.stat().st_size for file in checkpoint.files) <= WHOLE_FILE_BYTES
    for file in checkpoint.files:
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file == file]
        yield "weights", _hash_weights(file, tensors, whole=whole)
    for name in TOKENIZER_FILES:
        path = checkpoint.directory / name
        if path.exists():
            yield name, sha256(path.read_bytes()).digest()


def _group_part(group: LayerGroup) -> tuple[str, bytes]:
    mode = f" {group.mamba_cache_mode.value}" if group.mamba_cache_mode is not None else ""
    scale = f" x{group.block_scale}" if group.block_scale > 1 else ""
    return "group", f"{group.window} {list(group.layers)}{mode}{scale}".encode()


def _hash_weights(file: Path, tensors: list[TensorInfo], *, whole: bool) -> bytes:
    """SHA-256 of each tensor's bytes, or only of its first, middle and last _SAMPLE_BYTES."""
    digest = sha256()
    with file.open("rb") as stream:
        for tensor in sorted(tensors, key=lambda tensor: tensor.name):
            size = tensor.end - tensor.begin
            if whole or size <= 3 * _SAMPLE_BYTES:
                stream.seek(tensor.begin)
                digest.update(stream.read(size))
                continue
            for start in (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES):
                stream.seek(tensor.begin + start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
