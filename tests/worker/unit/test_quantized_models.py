"""Workers of quantized models: their fingerprints, and what is refused."""

from pathlib import Path

import pytest
import torch

from services.worker.backends.device import DeviceSetting, UnsuitableDevice
from services.worker.build import build_worker
from services.worker.models.errors import UnsupportedModel
from services.worker.models.quantization import QuantizationSetting
from services.worker.platform_choice import select_platform
from services.worker.settings import WorkerSettings
from tests.tiny_models import save_tiny_model


def settings(model: Path, quantization: QuantizationSetting, **changes: object) -> WorkerSettings:
    return WorkerSettings(
        model=model, quantization=quantization, num_blocks=40, max_model_len=64, **changes
    )


def test_keys_and_values_are_not_shared_with_those_of_stored_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    fingerprints = {
        build_worker(settings(tmp_path, quantization), "one", lambda: None).description.fingerprint
        for quantization in QuantizationSetting
    }
    assert len(fingerprints) == len(QuantizationSetting)


def test_a_model_without_native_code_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "opt")
    with pytest.raises(UnsupportedModel, match="quantization int8: architecture OPTForCausalLM"):
        build_worker(settings(tmp_path, QuantizationSetting.INT8), "one", lambda: None)


def test_quantizing_at_load_is_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = settings(tmp_path, QuantizationSetting.INT8, device=DeviceSetting.CUDA)
    with pytest.raises(UnsuitableDevice, match="quantized at load on the CPU alone"):
        select_platform(asked, lambda: None, None)
