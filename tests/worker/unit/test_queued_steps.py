"""On CUDA, the host queues steps without waiting for the device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.gpu import model
from services.common.request.adapter import adapter_digest
from services.common.request.sampling import SamplingParams
from services.worker.backends.attention import AttentionLayer, AttentionShape
from services.worker.backends.cuda.kernels import BatchInvariantKernels, CudaKernels
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.lora import LoraFactors, LoraLayer
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.kv.kv_groups import group_layers, layer_kinds
from services.worker.core.model_runner import ModelRunner
from services.worker.core.sampled import SampledOnDevice
from services.worker.core.step import StepInput
from services.worker.models.config import read_model_config
from services.worker.models.decoder import Decoder, attention_layers
from services.worker.models.lora.reader import LoraReader
from services.worker.models.mlp import is_static
from services.worker.models.model import LoadedModel
from services.worker.models.shard import Shard
from services.worker.models.stage import StageLayers
from services.worker.models.weights import load_weights
from services.worker.platforms.cuda import runner_on
from services.worker.platforms.interface import RunnerParts
from services.worker.platforms.prompt_shapes import every_shape, run_prompts
from tests.tiny_models import save_tiny_model
from tests.worker.fake_cuda import META, FakeCuda, QueuedOnly, Waits, split_k_without_code
from tests.worker.runner_driver import GREEDY
from tests.worker.step_story import DRAWN, story

MAX_MODEL_LEN = 1024
GROUPED = frozenset({torch.bfloat16})
WITH_LOGPROBS = SamplingParams(temperature=0.5, logprobs=2)


@pytest.fixture
def split_k(monkeypatch: pytest.MonkeyPatch) -> Any:
    return split_k_without_code(monkeypatch)


def fake_model(saved: PreTrainedModel, directory: Path, kernels: CudaKernels) -> LoadedModel:
    """The model in bfloat16, with weights without data."""
    config = read_model_config(directory)
    tensors = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16, device=META)
        for name, tensor in saved.state_dict().items()
    }
    source: Any = model.StateDict(SimpleNamespace(state_dict=lambda: tensors))
    weights = load_weights(config, source, torch.bfloat16, kernels, lambda *_: None)
    layers = StageLayers(0, config.num_layers, config.num_layers)
    return LoadedModel(
        model=Decoder(config, weights, kernels, MAX_MODEL_LEN),
        architecture="",
        dtype=torch.bfloat16,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        attention=attention_layers(config),
        is_static=all(is_static(layer.mlp) for layer in weights.layers),
        lora=LoraReader(config, Shard(0, 1), layers, torch.bfloat16, kernels),
    )


def fake_runner(
    loaded: LoadedModel,
    kernels: CudaKernels,
    mode: QueuedOnly,
    split_k: Any,
    adapters: LoraAdapters | None = None,
    max_num_batched_tokens: int = 512,
) -> ModelRunner:
    groups = group_layers(layer_kinds(loaded.attention, scales_blocks=False))
    shape = AttentionShape(
        loaded.attention, 64, 200, torch.bfloat16, META, tuple(group.layers for group in groups)
    )
    limits = BatchLimits(
        16,
        MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=64,
        num_blocks=200,
        windows=tuple(group.window for group in groups),
    )
    parts = RunnerParts(loaded, kernels, shape, limits, adapters=adapters)
    is_invariant = isinstance(kernels, BatchInvariantKernels)
    return runner_on(FakeCuda(mode), parts, split_k, batch_invariant=is_invariant)


def fake_adapters(
    loaded: LoadedModel, kernels: CudaKernels, directory: Path
) -> tuple[LoraAdapters, bytes]:
    """An adapter of all projections without data, and its digest."""
    assert loaded.lora is not None
    shapes, rank = loaded.lora.shapes, 5
    factors = {
        part: (
            LoraFactors(
                torch.empty(rank, shape.depth, dtype=torch.bfloat16, device=META),
                torch.empty(shape.columns, rank, dtype=torch.bfloat16, device=META),
                0,
            ),
        )
        for part, shape in shapes.items()
    }
    layers = [LoraLayer(**factors) for _ in loaded.attention]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_bytes(b"")
    adapters = LoraAdapters(lambda _: kernels.pack_lora(layers, shapes, torch.bfloat16), 1)
    digest = adapter_digest(directory)
    adapters.load(digest, directory)
    return adapters, digest


def queue(runner: ModelRunner, steps: list[StepInput]) -> None:
    """Queues steps whose tokens are sampled on the device. Then reads their outputs."""
    outputs = [runner.begin(step) for step in steps]
    assert all(isinstance(output, SampledOnDevice) for output in outputs)
    for output in outputs:
        assert isinstance(output, SampledOnDevice)
        assert output.wait().num_tokens.sum() > 0


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("mistral", CudaKernels()),
        ("mistral_window", CudaKernels()),
        ("gemma2", CudaKernels()),
        ("qwen3_moe", CudaKernels(GROUPED)),
        ("mistral_window", BatchInvariantKernels()),
    ],
)
def test_steps_are_queued(tmp_path: Path, kind: str, kernels: CudaKernels, split_k: Any) -> None:
    saved = save_tiny_model(tmp_path, kind, head_dim=16, num_hidden_layers=2)
    mode = QueuedOnly()
    loaded = fake_model(saved, tmp_path, kernels)
    runner = fake_runner(loaded, kernels, mode, split_k)
    with mode:
        queue(runner, story((GREEDY, DRAWN, WITH_LOGPROBS, DRAWN), len(runner.limits.windows)))


@pytest.mark.parametrize("kernels", [CudaKernels(), CudaKernels(GROUPED)], ids=["each", "grouped"])
def test_steps_with_adapters_are_queued(tmp_path: Path, kernels: CudaKernels, split_k: Any) -> None:
    saved = save_tiny_model(tmp_path, "llama", head_dim=16)
    mode = QueuedOnly()
    loaded = fake_model(saved, tmp_path, kernels)
    adapters, digest = fake_adapters(loaded, kernels, tmp_path)
    runner = fake_runner(loaded, kernels, mode, split_k, adapters)
    with mode:
        queue(
            runner,
            [
                replace(
                    step,
                    new_requests=tuple(
                        replace(new, adapter_digest=digest if new.row else b"")
                        for new in step.new_requests
                    ),
                )
                for step in story((GREEDY, DRAWN, GREEDY, DRAWN))
            ],
        )


def test_large_steps_have_grids_that_cuda_accepts(tmp_path: Path, split_k: Any) -> None:
    """With a window each query may be a lane. A grid has a row for each lane and KV head."""
    kernels = CudaKernels()
    saved = save_tiny_model(
        tmp_path, "mistral_window", num_attention_heads=16, num_key_value_heads=16, head_dim=16
    )
    mode = QueuedOnly()
    loaded = fake_model(saved, tmp_path, kernels)
    runner = fake_runner(loaded, kernels, mode, split_k, max_num_batched_tokens=8192)
    with mode:
        chunks = (shape for shape in every_shape(runner.limits) if shape.num_tokens > 1)
        run_prompts(runner, runner.limits, next(chunks))


def test_more_decodes_than_a_grid_has_rows_are_refused(split_k: Any) -> None:
    # Imported only here, because not all machines have xFormers.
    from services.worker.backends.cuda.paged_attention import (  # noqa: PLC0415
        XformersPagedAttention,
    )

    layer = AttentionLayer(32, 32, 16, 0.25)
    shape = AttentionShape((layer,), 64, 2, torch.bfloat16, META)
    attention = XformersPagedAttention(shape, FakeCuda(QueuedOnly()), 4, split_k)
    attention.decode_step(1024)
    with pytest.raises(
        UnsuitableDevice, match=r"max_num_seqs is above 1024, .* 32 key-value heads"
    ):
        attention.decode_step(1025)


def test_the_steps_of_the_gpu_benchmark_are_queued(
    monkeypatch: pytest.MonkeyPatch, split_k: Any
) -> None:
    monkeypatch.setattr(model, "BATCHES", (1, 4))
    monkeypatch.setattr(model, "MAX_NUM_BATCHED_TOKENS", 1024)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    shape = {**model.SHAPE, **heads, "num_hidden_layers": 1, "vocab_size": 320}
    mode = QueuedOnly()
    platform: Any = SimpleNamespace(
        torch_device=META,
        runner=lambda parts: runner_on(FakeCuda(mode), parts, split_k),
        warm_up_shapes=every_shape,
    )
    runner = model.build_runner(platform, model.random_model(shape, META))
    with mode:
        model.run_batch(runner, model.random_prompts(4, 320), 0)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.amax().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([0])],
        lambda _: torch.ones(3).to(META),
        lambda x: x.copy_(torch.ones(3)),
    ],
)
def test_what_waits_is_found(work: Callable[[torch.Tensor], object]) -> None:
    mode = QueuedOnly()
    x = torch.zeros(3, device=META)
    with mode, pytest.raises((Waits, RuntimeError)):
        work(x)
