"""A worker that is ready to run steps, and the description that it sends to the scheduler."""

from dataclasses import dataclass
from typing import Protocol

from services.common.request.pooling import Pooler
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.sampling.grammar import Grammars


class StepRunner(Protocol):
    """Runs steps one after the other."""

    @property
    def limits(self) -> BatchLimits: ...

    def reset(self) -> None:
        """Empties the batch, also after a step that failed."""

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs a step, or queues it on a device. Raises InvalidArgument for an invalid step."""

    def execute(self, step: StepInput) -> StepOutput:
        """Runs a step and waits for its output."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The model, capacity and identity of a worker: the fields of DescribeResponse."""

    incarnation: str
    """Identifies the worker's process."""
    model_name: str
    fingerprint: bytes
    """Identifies the model and the layout of KV blocks, in 32 bytes (see core/fingerprint.py)."""
    tokenizer_fingerprint: bytes
    """Identifies the tokenizer files, in 32 bytes. Empty if the model has no tokenizer files."""
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...]
    """The KV-cache groups, in the order of a request's block tables."""
    block_size: int
    num_blocks: int
    """Number of blocks of the KV cache, including the null block."""
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_sizing: str
    """A text that explains the number of blocks."""
    dtype: str
    kv_cache_dtype: str
    kernels: str
    rank: int = 0
    world_size: int = 1
    """Number of ranks, over all pipeline stages."""
    pipeline_parallel_size: int = 1
    pooler: Pooler | None = None
    """How the model pools prompts. None if it generates text."""
    num_tier_blocks: int = 0
    max_loras: int = 0
    """The maximum number of LoRA adapters in one step. 0 means LoRA is not enabled."""
    max_cpu_loras: int = 0
    num_speculative_tokens: int = 0
    """The maximum number of draft tokens for a request in one step. 0 means no speculation."""
    num_speculative_rows: int = 0
    """Limit on a step's tokens of decoding requests, including drafts. 0 means unlimited."""

    @property
    def pipeline_stage(self) -> int | None:
        """This rank's pipeline stage, from 0 on. None if there is only one stage."""
        if self.pipeline_parallel_size == 1:
            return None
        return self.rank * self.pipeline_parallel_size // self.world_size


@dataclass(frozen=True, slots=True)
class Worker:
    """The runner of steps, and the description that is sent to the scheduler."""

    runner: StepRunner
    description: WorkerDescription
    grammars: Grammars | None = None
    """Compiles the grammars that constrain outputs. It is None if the worker samples no tokens."""
    adapters: LoraAdapters | None = None
    """The loaded LoRA adapters. It is None if LoRA is not enabled."""
