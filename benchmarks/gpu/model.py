"""Compares the worker's model runner with transformers: a random model of 8 billion parameters on a
GPU.

Runner and transformers use the same weights and prompts, and generate the same number of tokens
greedily. End-of-text tokens are ignored.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.outcome import verdict
from benchmarks.gpu.parity import largest_difference
from benchmarks.gpu.timing import waiting_operations
from services.common.request.sampling import SamplingParams
from services.worker.backends.attention import AttentionShape
from services.worker.backends.cuda.kernels import CudaKernels
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.model_runner import ModelRunner
from services.worker.core.sampled import SampledOnDevice
from services.worker.core.step import NewRequest, StepInput
from services.worker.models.config import read_model_config
from services.worker.models.decoder import Decoder, attention_layers
from services.worker.models.model import LoadedModel
from services.worker.models.weights import load_weights
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.interface import RunnerParts
from services.worker.platforms.prompt_shapes import run_prompts

TOLERANCE = 0.25
"""Tolerance for log-probabilities in bfloat16. With a wrong token they differ by much more."""
BATCHES = (1, 16, 64, 256)
PROMPT, OUTPUT = 512, 128
BLOCK_SIZE = 64
MAX_MODEL_LEN = 1024
MAX_NUM_BATCHED_TOKENS = 8192
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}


class StateDict:
    """The tensors of a model in memory, with the checkpoint interface that `load_weights` needs."""

    num_bytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = model.state_dict()

    def check(self, expected: dict[str, tuple[int, ...]], _others: object) -> None:
        assert expected.keys() <= self.tensors.keys()

    @contextmanager
    def open(self) -> Iterator[StateDict]:
        yield self

    def read_parts(self, *parts: tuple[str, tuple[Any, ...]], dtype: torch.dtype) -> torch.Tensor:
        """Parts of tensors, stacked along their first axis, as a new tensor."""
        return torch.cat([self.tensors[name][index].to(dtype) for name, index in parts])


@dataclass(frozen=True, slots=True)
class Run:
    """The times of a run, in seconds.

    They are the time until every prompt has its first token, the median step time after that, and
    the total time.
    """

    prefill: float
    step: float
    total: float


def run(platform: CudaPlatform, copy: float, shape: dict[str, Any] = SHAPE) -> bool:
    """Prints tables. Returns whether the model's log-probabilities agree with transformers'. `copy`
    is the number of bytes that a plain copy reads and writes per second.
    """
    reference = random_model(shape, platform.torch_device)
    runner = build_runner(platform, reference)
    worst = largest_difference(
        runner, reference, random_prompts(4, shape["vocab_size"])[:, :100], 40
    )
    right = worst < TOLERANCE
    print(f"largest difference to transformers' log-probabilities: {worst:.3f}", end="")
    print("" if right else f", WRONG: above {TOLERANCE}", flush=True)
    waits = waiting_operations(
        partial(run_batch, runner, random_prompts(4, shape["vocab_size"]), 2)
    )
    print(
        f"operations for which steps wait: {', '.join(waits) or 'none'} {verdict(not waits)}",
        flush=True,
    )
    right = right and not waits
    ours = {batch: our_rate(runner, reference, shape, copy, batch) for batch in BATCHES}
    print("\n| batch | tokens/s | transformers' continuous batching |", flush=True)
    print("| ---: | ---: | ---: |")
    for batch, rate in ours.items():
        theirs = transformers_rate(reference, random_prompts(batch, shape["vocab_size"]))
        print(f"| {batch} | {rate:.0f} | {theirs:.0f} |", flush=True)
    return right


def our_rate(
    runner: ModelRunner, reference: PreTrainedModel, shape: dict[str, Any], copy: float, batch: int
) -> float:
    """Prints the bytes that decode steps of a batch read per second.

    Returns the output tokens per second of the whole run, including the time of the prompts.
    """
    weights = sum(parameter.numel() for parameter in reference.parameters())
    weights -= cast(Any, reference).get_input_embeddings().weight.numel()
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim
    prompts = random_prompts(batch, shape["vocab_size"])
    run_batch(runner, prompts, 0)
    run = run_batch(runner, prompts, 1)
    read = 2 * (weights + batch * (PROMPT + OUTPUT // 2) * per_token) / run.step
    if batch == BATCHES[0]:
        print(
            "\n| batch | s until all have a token | ms a decode step | GB/s | of copy bandwidth |"
        )
        print("| ---: | ---: | ---: | ---: | ---: |")
    figures = f"{run.prefill:.2f} | {run.step * 1e3:.2f} | {read / 1e9:.0f} | {read / copy:.0%}"
    print(f"| {batch} | {figures} |", flush=True)
    return batch * OUTPUT / run.total


def random_model(shape: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """A model with random bfloat16 weights on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=1, eos_token_id=2)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
        return cast(PreTrainedModel, model.eval())
    finally:
        torch.set_default_dtype(default)


def build_runner(platform: CudaPlatform, reference: PreTrainedModel) -> ModelRunner:
    """The worker's runner with the same weights, after its warm-up."""
    with temporary_config(reference) as directory:
        config = read_model_config(directory)
    kernels = CudaKernels()
    source: Any = StateDict(reference)
    weights = load_weights(config, source, torch.bfloat16, kernels, lambda *_: None)
    most = max(BATCHES)
    num_blocks = most * -(-(PROMPT + OUTPUT) // BLOCK_SIZE) + 1
    loaded = LoadedModel(
        model=Decoder(config, weights, kernels, MAX_MODEL_LEN),
        architecture="LlamaForCausalLM",
        dtype=torch.bfloat16,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        attention=attention_layers(config),
        is_static=True,
    )
    device = platform.torch_device
    layers = attention_layers(config)
    shape = AttentionShape(layers, BLOCK_SIZE, num_blocks, torch.bfloat16, device)
    limits = BatchLimits(
        max_num_seqs=most,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        vocab_size=config.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    runner = platform.runner(RunnerParts(loaded, kernels, shape, limits))
    begun = time.monotonic()
    for steps in platform.warm_up_shapes(limits):
        run_prompts(runner, limits, steps)
    print(f"\nkernels compiled and decodes recorded in {time.monotonic() - begun:.0f} s")
    return runner


@contextmanager
def temporary_config(reference: PreTrainedModel) -> Iterator[Path]:
    """A directory with the model's config.json."""
    with tempfile.TemporaryDirectory() as directory:
        reference.config.architectures = ["LlamaForCausalLM"]
        reference.config.save_pretrained(directory)
        yield Path(directory)


def random_prompts(batch: int, vocab_size: int) -> np.ndarray:
    """Token ids, int32 [batch, PROMPT]."""
    generator = np.random.default_rng(batch)
    return generator.integers(3, vocab_size, (batch, PROMPT), dtype=np.int32)


def run_batch(runner: ModelRunner, prompts: np.ndarray, generation: int) -> Run:
    """Runs a batch. Prompts are computed in steps that fill the token budget. Decode steps follow,
    two of which are in flight at a time.
    """
    batch = len(prompts)
    rows = np.arange(batch, dtype=np.int32)
    width = -(-(PROMPT + OUTPUT) // BLOCK_SIZE)
    tables = 1 + np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    together = MAX_NUM_BATCHED_TOKENS // PROMPT
    greedy = SamplingParams(temperature=0)
    begun = time.perf_counter()
    for first in range(0, batch, together):
        mine = rows[first : first + together]
        entering = tuple(
            NewRequest(int(row), prompts[row], PROMPT, greedy, (tables[row],)) for row in mine
        )
        counts = np.full(len(mine), PROMPT, np.int32)
        runner.execute(
            StepInput(generation, first, mine, counts, counts * 0, new_requests=entering)
        )
    prefilled = time.perf_counter()
    flying: deque[Any] = deque()
    times, ones = [], np.ones(batch, np.int32)
    for number in range(OUTPUT - 1):
        computed = np.full(batch, PROMPT + number, np.int32)
        flying.append(runner.begin(StepInput(generation, batch + number, rows, ones, computed)))
        if len(flying) == 2:
            _wait(flying.popleft())
            times.append(time.perf_counter())
    _wait(flying.popleft())
    ended = time.perf_counter()
    return Run(prefilled - begun, float(np.median(np.diff(times))), ended - begun)


def _wait(output: object) -> None:
    if isinstance(output, SampledOnDevice):
        output.wait()


def transformers_rate(reference: PreTrainedModel, prompts: np.ndarray) -> float:
    """Runs the prompts with transformers' continuous batching. Returns tokens per second, from the
    start of the first request to the end of the last one.
    """
    make_config: Any = GenerationConfig
    settings = make_config(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = cast(Any, reference).generate_batch(prompts.tolist(), generation_config=settings)
    spans = [answer.lifespan for answer in answers.values()]
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    assert tokens == len(prompts) * OUTPUT, f"{tokens} tokens of {len(prompts)} requests"
    took: float = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return tokens / took
