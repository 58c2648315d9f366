"""A worker that is ready to run steps, and its description."""

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
    """Runs steps, one after the other."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of the batch and of its steps."""

    def reset(self) -> None:
        """Empties the batch, also after a step that failed."""

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs one step, or queues it on a device. Raises InvalidArgument for an invalid step."""

    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step and waits for its output."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Model, capacity and identity: the fields of the contract's DescribeResponse."""

    incarnation: str
    """Unique to each process."""
    model_name: str
    fingerprint: bytes
    """Of the model, 32 bytes (see core/fingerprint.py)."""
    tokenizer_fingerprint: bytes
    """Of the tokenizer files, 32 bytes. It is empty if the model has no tokenizer files."""
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...]
    """The KV-cache groups, in the order of a request's block tables."""
    block_size: int
    num_blocks: int
    """Blocks of the KV cache, including the null block."""
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_sizing: str
    """Explains the number of blocks, as text."""
    dtype: str
    kv_cache_dtype: str
    kernels: str
    """What computes the model, as text."""
    rank: int = 0
    world_size: int = 1
    """Number of ranks, over all pipeline stages."""
    pipeline_parallel_size: int = 1
    pooler: Pooler | None = None
    """Pools prompts. It is None if the model generates."""
    num_tier_blocks: int = 0
    max_loras: int = 0
    """The maximum number of LoRA adapters in one step. 0 means LoRA is not enabled."""
    max_cpu_loras: int = 0
    """Maximum number of LoRA adapters in memory."""
    num_speculative_tokens: int = 0
    """The maximum number of draft tokens of a request in a step. 0 means no speculation."""
    num_speculative_rows: int = 0
    """Maximum number of tokens of decoding requests in a step, drafts included. 0 means unlimited.
    """

    @property
    def pipeline_stage(self) -> int | None:
        """This rank's pipeline stage, from 0, or None if there is one stage."""
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
    """The loaded LoRA adapters. They are None if LoRA is not enabled."""
