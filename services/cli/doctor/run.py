"""Runs a model for a short time, without scheduler and pool, and compares its speed with the
machine's limits.
"""

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.cli.amounts import seconds_text
from services.cli.doctor.limits import Limits
from services.cli.doctor.report import Fact
from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import DeviceSetting
from services.worker.build import build_worker
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import Worker
from services.worker.models.files.checkpoint import Checkpoint, open_checkpoint
from services.worker.models.files.gguf import BLOCK_TYPES
from services.worker.models.files.json_file import read_json_object
from services.worker.models.pooling_config import RunnerSetting
from services.worker.settings import WorkerSettings

_PROMPT, _NUM_PROMPTS, _NUM_DECODES = 512, 4, 32
_GREEDY = SamplingParams(temperature=0)
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Work:
    """The work with a model's weights: the bytes of weights that a decode step reads, and the
    arithmetic operations for a prompt token. Attention and the KV cache are not counted.
    """

    step_bytes: int
    flops: int


def run_model(model: Path, name: str, limits: Limits) -> list[Fact]:
    """Runs prompts one at a time, then decode steps of one request, on the CPU. Raises the errors
    that a worker raises at its start.
    """
    settings = WorkerSettings(
        model=model,
        device=DeviceSetting.CPU,
        runner=RunnerSetting.GENERATE,
        max_num_seqs=1,
        max_num_batched_tokens=_PROMPT,
    )
    worker = build_worker(settings, "doctor", lambda: None)
    request = _Request(worker)
    prompt = min(request.prompt() for _ in range(_NUM_PROMPTS))
    decode = statistics.median(request.decode() for _ in range(_NUM_DECODES))
    dtype: torch.dtype = getattr(torch, worker.description.dtype)
    work = work_of(open_checkpoint(model), dtype)
    facts = [
        Fact("model", {"name": name, "dtype": str(dtype)[6:]}, f"{name}, in {str(dtype)[6:]}"),
        _rate("prefill", request.length / prompt, prompt / request.length),
        _rate("decode", 1 / decode, decode),
    ]
    if work is None:
        return facts
    flops, read = work.flops * request.length / prompt, work.step_bytes / decode
    return [
        *facts,
        Fact(
            "arithmetic",
            {"gflops": round(flops / 1e9, 1), "share": round(flops / limits.flops[dtype], 3)},
            f"{flops / 1e9:.0f} GFLOP/s of prefill, {flops / limits.flops[dtype]:.0%} of the limit",
        ),
        Fact(
            "bandwidth",
            {
                "gb_per_s": round(read / 1e9, 1),
                "share": round(read / limits.bytes_per_second, 3),
                "step_bytes": work.step_bytes,
            },
            f"{read / 1e9:.1f} GB/s of decode, {read / limits.bytes_per_second:.0%} of the limit; "
            f"a step reads {work.step_bytes / 1e6:.0f} MB, which caches may hold",
        ),
    ]


def work_of(checkpoint: Checkpoint, dtype: torch.dtype) -> Work | None:
    """The work of a model whose float weights are loaded as `dtype`. Only the fraction of the
    experts that a token uses counts. None if weights are packed integers of unknown shapes.
    """
    config = read_json_object(checkpoint.directory / "config.json")
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    used = (config.get("num_experts_per_tok") or num_experts) / num_experts
    sizes, flops = {"layers": 0.0, _EMBEDDING: 0.0, _HEAD: 0.0}, 0.0
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype not in (*_FLOATS, *BLOCK_TYPES):
            return None
        part = used if ".experts." in name else 1
        count = math.prod(tensor.shape) * part
        end = next((end for end in (_EMBEDDING, _HEAD) if name.endswith(end)), "layers")
        is_float = tensor.dtype in _FLOATS
        sizes[end] += count * dtype.itemsize if is_float else tensor.num_bytes * part
        flops += 2 * count if end == "layers" and len(tensor.shape) > 1 else 0
    return Work(int(sizes["layers"] + (sizes[_HEAD] or sizes[_EMBEDDING])), int(flops))


def _rate(name: str, tokens_per_second: float, seconds: float) -> Fact:
    rounded = round(tokens_per_second, 1)
    text = f"{tokens_per_second:.0f} tokens/s, {seconds_text(seconds)} a token"
    return Fact(name, {"tokens_per_s": rounded}, text)


class _Request:
    """One request, which the worker runs alone. Its prompt can be computed repeatedly."""

    def __init__(self, worker: Worker) -> None:
        described = worker.description
        self.length = min(_PROMPT, described.max_model_len - _NUM_DECODES)
        num_blocks = -(-(self.length + _NUM_DECODES) // described.block_size)
        self._runner = worker.runner
        self._tokens = np.random.default_rng(0).integers(
            0, described.vocab_size, self.length, np.int32
        )
        table = np.arange(1, 1 + num_blocks, dtype=np.int32)
        self._tables = tuple(table for _ in described.groups)
        self._num_computed = self._generation = 0

    def prompt(self) -> float:
        """Computes the prompt in an empty batch. Returns the seconds of the step."""
        self._generation += 1
        self._num_computed = 0
        new = NewRequest(0, self._tokens, self.length, _GREEDY, self._tables)
        return self._step(self.length, (new,))

    def decode(self) -> float:
        """Computes the next token. Returns the seconds of the step."""
        return self._step(1, ())

    def _step(self, num_tokens: int, new: tuple[NewRequest, ...]) -> float:
        step = StepInput(
            generation=self._generation,
            step=self._num_computed,
            rows=np.zeros(1, np.int32),
            num_scheduled_tokens=np.full(1, num_tokens, np.int32),
            num_computed_tokens=np.full(1, self._num_computed, np.int32),
            new_requests=new,
        )
        begun = time.perf_counter()
        self._runner.execute(step)
        self._num_computed += num_tokens
        return time.perf_counter() - begun
