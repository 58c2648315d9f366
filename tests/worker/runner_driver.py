"""Drives a runner as a scheduler would: block tables, chunks, prefix hits, preemptions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.common.sampling import SamplingParams
from services.worker.attention.interface import AttentionShape
from services.worker.core.batch import BatchLimits
from services.worker.core.lookahead import Lookahead
from services.worker.core.runner import Runner
from services.worker.core.step import AppendedBlocks, NewRequest, StepInput, StepOutput
from services.worker.device import CpuDevice
from services.worker.kernels.torch_kernels import TorchKernels
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import read_model_config
from services.worker.models.decoder import Decoder
from services.worker.models.loader import load_weights

GREEDY = SamplingParams(temperature=0)
MAX_MODEL_LEN = 512


def ints(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, np.int32)


def build_runner(
    directory: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 600,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 512,
    dtype: torch.dtype = torch.float32,
    runs_ahead: bool = False,
) -> Runner:
    """A runner over the model in a directory; one that `runs_ahead` keeps its tokens there."""
    config = read_model_config(directory)
    kernels = TorchKernels()
    weights = load_weights(config, open_checkpoint(directory), dtype, kernels, lambda *_: None)
    shape = AttentionShape(config.attention_layers, block_size, num_blocks, dtype)
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=config.vocab_size,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    decoder = Decoder(config, weights, kernels, MAX_MODEL_LEN)
    lookahead = Lookahead(CpuDevice(), max_num_seqs) if runs_ahead else None
    return Runner(decoder, kernels.paged_attention(shape), limits, lookahead=lookahead)


def appended(*grown: tuple[int, list[int]]) -> AppendedBlocks:
    """Growth of tables: each slot with its further blocks."""
    return AppendedBlocks(
        slots=ints(*(slot for slot, _ in grown)),
        num_blocks=ints(*(len(block_ids) for _, block_ids in grown)),
        block_ids=ints(*(block for _, block_ids in grown for block in block_ids)),
    )


@dataclass
class Request:
    """A request as the driver knows it. `num_computed` also counts tokens of a prefix hit."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.output) >= self.max_tokens


class Driver:
    """Runs requests step by step. Blocks are handed out in a shuffled order, tables grow block by
    block, and freed blocks are handed out again last, still full of what was in them. Blocks in
    `shared` are never handed out again.
    """

    def __init__(self, runner: Runner, *, block_size: int, num_blocks: int, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = block_size
        self._free = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        self.shared: set[int] = set()
        self._removed: list[int] = []
        self._slots = list(range(16))
        self._step = 0

    def step(self, scheduled: Sequence[tuple[Request, int]]) -> StepOutput:
        """Computes so many tokens of each request."""
        entering: list[NewRequest] = []
        grown: list[tuple[int, list[int]]] = []
        for request, count in scheduled:
            needed = -(-(request.num_computed + count) // self.block_size)
            added = [self._free.pop() for _ in range(needed - len(request.block_ids))]
            request.block_ids += added
            if request.slot is None:
                request.slot = self._slots.pop(0)
                entering.append(self._new_request(request))
            elif added:
                grown.append((request.slot, added))
        output = self.runner.execute(
            StepInput(
                generation=1,
                step=self._step,
                slots=ints(*(request.slot for request, _ in scheduled)),
                num_scheduled_tokens=ints(*(count for _, count in scheduled)),
                num_computed_tokens=ints(*(request.num_computed for request, _ in scheduled)),
                removed_slots=ints(*self._removed),
                new_requests=tuple(entering),
                appended_blocks=(appended(*grown),) if grown else (),
            )
        )
        self._step += 1
        self._removed.clear()
        self._take(scheduled, output)
        return output

    def run(self, requests: Sequence[Request], *, chunk: int = 512) -> None:
        """Runs requests together to their ends, prompts in chunks."""
        while running := [request for request in requests if not request.finished]:
            self.step(
                [
                    (request, min(chunk, len(request.tokens) - request.num_computed))
                    for request in running
                ]
            )
            for request in running:
                if request.finished:
                    self.remove(request)

    def remove(self, request: Request) -> None:
        """Takes a request out of the batch; its tokens stay, its blocks are given back."""
        assert request.slot is not None
        self._removed.append(request.slot)
        self._slots.append(request.slot)
        self._free[:0] = [block for block in request.block_ids if block not in self.shared]
        request.slot = None
        request.block_ids = []
        request.num_computed = 0

    def _new_request(self, request: Request) -> NewRequest:
        assert request.slot is not None
        return NewRequest(
            slot=request.slot,
            token_ids=ints(*request.tokens),
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
            block_tables=(ints(*request.block_ids),),
        )

    def _take(self, scheduled: Sequence[tuple[Request, int]], output: StepOutput) -> None:
        first = 0
        for (request, count), sampled in zip(scheduled, output.num_tokens.tolist(), strict=True):
            request.num_computed += count
            assert sampled == int(request.num_computed == len(request.tokens))
            request.output += output.token_ids[first : first + sampled].tolist()
            first += sampled
