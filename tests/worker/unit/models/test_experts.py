"""Experts: tokens grouped by expert, equal results in every batch, and checkpoint formats."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.backends.cuda.kernels import CudaKernels
from services.worker.backends.kernels import DecoderWeights, Kernels
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.models.config import read_model_config
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.mlp import Experts, GroupedExperts
from services.worker.models.weights import load_weights
from tests.quantized_checkpoints import FORMATS, save_quantized
from tests.tiny_models import save_tiny_model


def load(directory: Path, kernels: Kernels) -> DecoderWeights:
    config, checkpoint = read_model_config(directory), open_checkpoint(directory)
    return load_weights(config, checkpoint, torch.float32, kernels, lambda *_: None)


def experts_of(directory: Path) -> Experts:
    experts = load(directory, TorchKernels()).layers[0].mlp
    assert isinstance(experts, Experts)
    return experts


def test_a_tokens_result_does_not_depend_on_other_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    experts = experts_of(tmp_path)
    torch.manual_seed(0)
    hidden = torch.randn(24, 48)
    with torch.inference_mode():
        together = experts(hidden, 24)
        for row in range(24):
            alone = experts(hidden[row : row + 1], 1)
            torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=1e-6)


def test_padding_rows_are_not_computed_by_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mixtral")
    hidden = torch.randn(8, 48)
    with torch.inference_mode():
        output = experts_of(tmp_path)(hidden, 5)
    assert output[:5].abs().min() > 0
    assert not output[5:].any()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_grouped_experts_equal_experts_computed_one_by_one(
    tmp_path: Path, kind: str, stacked: bool
) -> None:
    model = save_tiny_model(tmp_path, kind)
    torch.manual_seed(0)
    hidden = torch.randn(6, 48)
    kernels = CudaKernels(grouped=frozenset({torch.float32}))
    with torch.inference_mode():
        apart = experts_of(tmp_path)(hidden, 6)
        if stacked:
            stack_experts(tmp_path, model.state_dict())
        together = load(tmp_path, kernels).layers[0].mlp
        assert isinstance(together, GroupedExperts)
        torch.testing.assert_close(together(hidden, 6), apart)
        torch.testing.assert_close(together(hidden[:1], 1), apart[:1])


@pytest.mark.parametrize("of", ["gptq", "int8"])
def test_quantized_experts_can_be_grouped(tmp_path: Path, of: str) -> None:
    save_tiny_model(tmp_path / "plain", "mixtral")
    save_quantized(tmp_path / "plain", tmp_path / "model", FORMATS[of])
    hidden = torch.randn(6, 48)
    kernels = CudaKernels(grouped=frozenset({torch.float32}))
    with torch.inference_mode():
        together = load(tmp_path / "model", kernels).layers[0].mlp
        assert isinstance(together, GroupedExperts)
        torch.testing.assert_close(together(hidden, 6), experts_of(tmp_path / "model")(hidden, 6))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_may_be_stacked_in_one_tensor(tmp_path: Path, kind: str) -> None:
    model = save_tiny_model(tmp_path, kind)
    torch.manual_seed(0)
    hidden = torch.randn(6, 48)
    with torch.inference_mode():
        apart = experts_of(tmp_path)(hidden, 6)
        stack_experts(tmp_path, model.state_dict())
        torch.testing.assert_close(experts_of(tmp_path)(hidden, 6), apart, rtol=0, atol=0)


def stack_experts(directory: Path, in_memory: dict[str, torch.Tensor]) -> None:
    """Writes the weights of experts and routers, in the layout that transformers uses in memory."""
    path = directory / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if "experts." not in name and not name.endswith(".gate.weight")
    }
    for name, tensor in in_memory.items():
        if name not in tensors and name != "lm_head.weight":
            tensors[name] = tensor.contiguous()
    save_file(tensors, path)
