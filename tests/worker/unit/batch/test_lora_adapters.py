"""Which LoRA adapters a worker loads, and why it refuses others."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import FailedPrecondition, ResourceExhausted
from services.common.request.adapter import adapter_digest
from services.worker.backends.cuda.kernels import CudaKernels
from services.worker.backends.device import CpuDevice
from services.worker.backends.kernels import Kernels
from services.worker.backends.lora import PARTS, LoraRows, PackedLora
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.models.config import DtypeSetting
from services.worker.models.errors import ModelError
from services.worker.models.files.checkpoint import CPU, open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.lora.reader import LoraReader
from services.worker.models.model import LoadOptions
from tests.lora_adapters import CONFIGS, save_adapter
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import ints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "llama")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        save_adapter(directory, directory / "adapters" / name, seed, **config)
    return directory


def reader(model: Path, kernels: Kernels) -> LoraReader:
    options = LoadOptions(64, DtypeSetting.FLOAT32)
    loaded = load_model(open_checkpoint(model), options, kernels, lambda *_: None)
    assert loaded.lora is not None
    return loaded.lora


@pytest.fixture(scope="module")
def read(model: Path) -> Callable[[Path], PackedLora]:
    return partial(reader(model, TorchKernels()).read, max_rank=20, device=CPU)


def changed(model: Path, to: Path, **values: Any) -> Path:
    source = model / "adapters" / "everywhere"
    to.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**config, **values}))
    (to / "adapter_model.safetensors").write_bytes(
        (source / "adapter_model.safetensors").read_bytes()
    )
    return to


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"use_qalora": True}, "use_qalora: "),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "lora_ga"}, "trained with changed base weights"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": "much"}, "lora_alpha must be a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a positive number, not nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a positive number"),
        (
            {"rank_pattern": {"q_proj": float("inf")}},
            "rank_pattern.q_proj must be a positive number",
        ),
        ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern.q_proj must be a positive number"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 32}}, "is 32, above max_lora_rank 20"),
        ({"rank_pattern": {"q_proj": 5}}, "lora_A.weight has shape [4, 48], not [5, 48]"),
        ({"rank_pattern": {"(": 5}}, "the pattern '(' is not a regular expression"),
        ({"rank_pattern": {r"((a|\w|\.)+)+x": 4}}, "rank_pattern: the pattern '((a|"),
        ({"alpha_pattern": {"(v+)*_proj": 4}}, "and none after a group"),
        ({"alpha_pattern": {".*.*.*.*.*_proj": 4}}, "may have 4 of *, +, ? and {, and none"),
    ],
)
def test_unsupported_adapter_features_are_refused_by_name(
    model: Path, tmp_path: Path, read: Any, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read(changed(model, tmp_path / "adapter", **values))
    assert problem in refused.value.message


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("base_model.model.lm_head.lora_A.weight", "the model has no such projection"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "the model has no such projection",
        ),
        (
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
            "the model has no such projection",
        ),
    ],
)
def test_modules_that_take_no_adapter_are_refused(
    model: Path, tmp_path: Path, read: Any, name: str, problem: str
) -> None:
    directory = changed(model, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(4, 48)}, file)
    with pytest.raises(ModelError, match=problem):
        read(directory)


def test_a_missing_half_is_found(model: Path, tmp_path: Path, read: Any) -> None:
    directory = changed(model, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"up_proj.lora_B.weight is missing$"):
        read(directory)


def test_tensors_that_are_no_weights_are_refused(model: Path, tmp_path: Path, read: Any) -> None:
    directory = changed(model, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.bool) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ModelError, match="has data type BOOL, which is not supported"):
        read(directory)


def test_a_configuration_that_is_nested_too_deeply_is_no_json(
    model: Path, tmp_path: Path, read: Any
) -> None:
    directory = changed(model, tmp_path / "adapter")
    (directory / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="the file is not valid JSON"):
        read(directory)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    directory = changed(model, tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    os.mkfifo(directory / "adapter_model.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        adapter_digest(directory)


def test_at_most_max_cpu_loras_adapters_are_loaded(model: Path, read: Any) -> None:
    held = LoraAdapters(read, 2)
    first, second, third = (model / "adapters" / name for name in CONFIGS)
    digests = [adapter_digest(directory) for directory in (first, second, third)]
    for directory in (first, second, second):
        held.load(adapter_digest(directory), directory, digests)
    with pytest.raises(ResourceExhausted, match="max_cpu_loras"):
        held.load(digests[2], third, digests)
    held.load(digests[2], third, digests[1:])


def test_files_that_changed_are_another_adapter(model: Path, tmp_path: Path, read: Any) -> None:
    directory = changed(model, tmp_path / "adapter")
    digest = adapter_digest(directory)
    assert digest == adapter_digest(changed(model, tmp_path / "copy"))
    assert digest != adapter_digest(changed(model, tmp_path / "other", lora_alpha=9))
    (directory / "adapter_config.json").write_text(
        (tmp_path / "other" / "adapter_config.json").read_text()
    )
    with pytest.raises(FailedPrecondition, match="changed since"):
        LoraAdapters(read, 1).load(digest, directory)


def test_grouped_multiplications_add_what_those_adapter_by_adapter_do(model: Path) -> None:
    grouped = CudaKernels(grouped=frozenset({torch.float32}))
    deltas, shapes = [], {}
    for kernels in (TorchKernels(), grouped):
        of_model = reader(model, kernels)
        shapes = of_model.shapes
        packed = tuple(of_model.read(model / "adapters" / name, 20, CPU) for name in CONFIGS)
        assert packed[0].num_bytes <= of_model.num_bytes(CONFIGS["everywhere"]["r"])
        rows = LoraRows(packed, ints(1, 5, 0, 2, 3), ints(0, 2, 3, 5), 6, CpuDevice())
        deltas.append([kernels.lora_step(rows).layer(index) for index in range(2)])
    for index in range(2):
        for part in PARTS:
            plain, together = (getattr(of_kind[index], part) for of_kind in deltas)
            x = torch.randn(6, shapes[part].depth)
            product = torch.randn(6, shapes[part].columns)
            expected = plain.added_to(product.clone(), x)
            torch.testing.assert_close(together.added_to(product.clone(), x), expected)
            assert torch.equal(expected[4], product[4])
