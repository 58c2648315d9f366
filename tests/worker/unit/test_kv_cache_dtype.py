"""Workers with 8-bit keys and values: KV cache sizes, and configurations that are refused."""

from pathlib import Path

import pytest
import torch

from services.common.process.settings import SettingError, parse_settings
from services.worker.backends.choices import DeviceSetting, KVCacheDtype
from services.worker.backends.device import UnsuitableDevice
from services.worker.build import build_worker
from services.worker.core.worker import WorkerDescription
from services.worker.models.config import DtypeSetting
from services.worker.models.errors import UnsupportedModel
from services.worker.platform_choice import select_platform
from services.worker.settings import WorkerSettings
from tests.pooling_models import save_embedder
from tests.tiny_models import save_tiny_model

INT8 = KVCacheDtype.INT8_PER_TOKEN_HEAD


def settings(model: Path, **changes: object) -> WorkerSettings:
    return WorkerSettings(model=model, **{"kv_cache_dtype": INT8, "max_model_len": 64, **changes})


def description(model: Path, **changes: object) -> WorkerDescription:
    return build_worker(settings(model, **changes), "one", lambda: None).description


@pytest.mark.parametrize(
    ("dtype", "least"), [(DtypeSetting.FLOAT32, 3.7), (DtypeSetting.BFLOAT16, 1.88)]
)
def test_the_same_memory_has_more_blocks_of_8_bits(
    tmp_path: Path, dtype: DtypeSetting, least: float
) -> None:
    """A head of 64 elements takes 64 bytes and a scale of 4 bytes, instead of 128 or 256 bytes."""
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    plain, coded = (
        description(
            tmp_path,
            dtype=dtype,
            kv_cache_dtype=kept,
            kv_cache_memory_bytes=4 << 20,
            max_num_seqs=512,
        )
        for kept in KVCacheDtype
    )
    assert coded.num_blocks >= int(least * plain.num_blocks) > 100
    itemsize = 4 if dtype is DtypeSetting.FLOAT32 else 2
    assert coded.bytes_per_block * 64 * itemsize == plain.bytes_per_block * (64 + 4)
    assert plain.kv_cache_dtype == plain.dtype == coded.dtype == dtype.value
    assert coded.kv_cache_dtype == "int8_per_token_head"
    assert coded.fingerprint != plain.fingerprint


def test_8_bit_caches_are_refused_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsuitableDevice, match="a KV cache in 8 bits is supported only on the CPU"):
        select_platform(settings(tmp_path, device=DeviceSetting.CUDA), lambda: None, None)


def test_a_model_that_caches_nothing_is_refused(tmp_path: Path) -> None:
    save_embedder(tmp_path, "bert", "cls")
    with pytest.raises(
        UnsupportedModel, match="kv_cache_dtype int8_per_token_head is not supported for an encoder"
    ):
        description(tmp_path)


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_an_unknown_kv_cache_dtype_is_refused(tmp_path: Path, kept: str) -> None:
    flags = ["--model", str(tmp_path), "--kv-cache-dtype", kept]
    with pytest.raises(SettingError, match="--kv-cache-dtype must be one of"):
        parse_settings(WorkerSettings, "worker", flags, {})
