"""Runs the worker's code for CUDA without a GPU, and compares its tokens with the tokens of a
worker on the CPU.

The code includes xFormers' kernel, decodes over static buffers of bucket sizes, sampling on the
device, tokens that stay on the device, and two steps in flight. In place of replaying a CUDA graph,
the captured function is called again.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from benchmarks.gpu.parity import largest_difference
from services.worker.backends.attention import AttentionShape
from services.worker.backends.cuda.kernels import BatchInvariantKernels, CudaKernels
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.kv.kv_groups import group_layers, layer_kinds
from services.worker.core.model_runner import ModelRunner
from services.worker.models.config import DtypeSetting
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadOptions
from services.worker.platforms.cuda import runner_on
from services.worker.platforms.interface import RunnerParts
from tests.tiny_models import save_tiny_model
from tests.worker.interpreted.interpreted_ops import AnywhereSplitK, WideCpu
from tests.worker.runner_driver import GREEDY, MAX_MODEL_LEN, build_runner
from tests.worker.step_story import DRAWN, PENALISED, run_plainly, run_two_in_flight, story

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 40, 16


def save_uniform(directory: Path) -> None:
    save_tiny_model(directory, "mistral")


def save_hybrid(directory: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.25,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def save_capped(directory: Path) -> None:
    save_tiny_model(directory, "gemma2")


def save_experts(directory: Path) -> None:
    save_tiny_model(directory, "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])


def runner_as_on_cuda(directory: Path, *, batch_invariant: bool = False) -> ModelRunner:
    grouped = CudaKernels(grouped=frozenset({torch.float32}))
    kernels = BatchInvariantKernels() if batch_invariant else grouped
    options = LoadOptions(MAX_MODEL_LEN, DtypeSetting.FLOAT32)
    loaded = load_model(open_checkpoint(directory), options, kernels, lambda *_: None)
    groups = group_layers(layer_kinds(loaded.attention, scales_blocks=False))
    shape = AttentionShape(
        loaded.attention,
        BLOCK_SIZE,
        NUM_BLOCKS,
        torch.float32,
        groups=tuple(group.layers for group in groups),
    )
    limits = BatchLimits(
        MAX_NUM_SEQS,
        MAX_MODEL_LEN,
        max_num_batched_tokens=512,
        vocab_size=loaded.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        windows=tuple(group.window for group in groups),
    )
    assert loaded.is_static
    parts = RunnerParts(loaded, kernels, shape, limits)
    return runner_on(WideCpu(), parts, AnywhereSplitK, batch_invariant=batch_invariant)


@pytest.mark.parametrize(
    ("save", "batch_invariant"),
    [
        (save_uniform, False),
        (save_hybrid, False),
        (save_capped, False),
        (save_experts, False),
        (save_hybrid, True),
    ],
)
def test_the_tokens_are_those_of_the_cpu(tmp_path: Path, save, batch_invariant: bool) -> None:
    save(tmp_path)
    plain = build_runner(tmp_path, num_blocks=NUM_BLOCKS)
    as_on_cuda = runner_as_on_cuda(tmp_path, batch_invariant=batch_invariant)
    steps = story((GREEDY, DRAWN, DRAWN, PENALISED), len(as_on_cuda.limits.windows))
    expected = run_plainly(plain, steps)
    outputs = run_two_in_flight(as_on_cuda, steps)
    assert [output.token_ids.tolist() for output in outputs] == [
        output.token_ids.tolist() for output in expected
    ]


@pytest.mark.parametrize("save", [save_hybrid, save_capped])
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, save) -> None:
    """The prompt includes a chunk that is longer than the window."""
    save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    texts = np.random.default_rng(0).integers(3, 320, (2, 26), dtype=np.int32)
    assert largest_difference(runner_as_on_cuda(tmp_path), reference, texts, 4) < 1e-3
