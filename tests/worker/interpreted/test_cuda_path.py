"""All that a worker does on CUDA, but for the device: the tokens are the CPU worker's.

xFormers' kernel, decodes over static buffers by bucket, sampling where the logits are, tokens fed
forward and two steps in flight; what a graph would repeat is called again instead.
"""

from pathlib import Path

import torch

from services.worker.attention.interface import AttentionShape
from services.worker.core.batch import BatchLimits
from services.worker.core.decode_buckets import DecodeBuckets
from services.worker.core.lookahead import Lookahead
from services.worker.core.runner import Runner
from services.worker.kernels.cuda_kernels import CudaKernels
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import read_model_config
from services.worker.models.decoder import Decoder
from services.worker.models.loader import load_weights
from tests.tiny_models import save_tiny_model
from tests.worker.interpreted.interpreted_ops import InterpretedSplitK, WideCpu
from tests.worker.runner_driver import GREEDY, build_runner
from tests.worker.step_story import DRAWN, PENALISED, run_plainly, run_two_in_flight, story

MAX_MODEL_LEN = 512


def runner_as_on_cuda(directory: Path) -> Runner:
    config = read_model_config(directory)
    device = WideCpu()
    kernels = CudaKernels(device, MAX_MODEL_LEN, InterpretedSplitK)
    weights = load_weights(
        config, open_checkpoint(directory), torch.float32, kernels, lambda *_: None
    )
    model = Decoder(config, weights, kernels, MAX_MODEL_LEN)
    attention = kernels.paged_attention(
        AttentionShape(config.attention_layers, 16, 40, torch.float32)
    )
    limits = BatchLimits(16, MAX_MODEL_LEN, 512, config.vocab_size, 16, 40)
    return Runner(
        model,
        attention,
        limits,
        device,
        Lookahead(device, limits.max_num_seqs),
        DecodeBuckets(model, attention, device),
    )


def test_the_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mistral")
    steps = story((GREEDY, DRAWN, DRAWN, PENALISED))
    expected = run_plainly(build_runner(tmp_path, num_blocks=40), steps)
    outputs = run_two_in_flight(runner_as_on_cuda(tmp_path), steps)
    assert [output.token_ids.tolist() for output in outputs] == [
        output.token_ids.tolist() for output in expected
    ]
