"""A worker that is ready for steps, and its description."""

from dataclasses import dataclass
from typing import Protocol

from services.common.pooling import Pooler
from services.worker.core.input_batch import BatchLimits
from services.worker.core.kv_groups import LayerGroup
from services.worker.core.lora_adapters import LoraAdapters
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.sampling.grammar import Grammars


class StepRunner(Protocol):
    """Runs steps, one after the other."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of the batch and of its steps."""

    def reset(self) -> None:
        """Empties the batch, also after a step that failed half-way."""

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        """Runs one step, or queues it on a device. Raises InvalidArgument for an invalid one."""

    def execute(self, step: StepInput) -> StepOutput:
        """Runs one step and waits for its output."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Model, capacity and identity: the fields of the contract's DescribeResponse.

    Block tables follow the order of `groups`. `fingerprint` is 32 bytes,
    `tokenizer_fingerprint` too, or empty where the model has no tokenizer files. `pooler` is None
    for a model that generates. `num_tier_blocks`: blocks of offloaded keys and values. `max_loras`:
    adapters that the requests of a step may have, 0 if none are served; `max_cpu_loras`: adapters
    that may be loaded. `num_speculative_tokens`: most drafts of a request in a step, 0 if none are
    proposed; `num_speculative_rows`: that decoding requests and their drafts are to fill in a step,
    at most, 0 if any number. `kv_cache_dtype`: what keys and values are kept as.
    """

    incarnation: str
    model_name: str
    fingerprint: bytes
    tokenizer_fingerprint: bytes
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...]
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_sizing: str
    dtype: str
    kv_cache_dtype: str
    rank: int = 0
    world_size: int = 1
    pipeline_parallel_size: int = 1
    pooler: Pooler | None = None
    num_tier_blocks: int = 0
    max_loras: int = 0
    max_cpu_loras: int = 0
    num_speculative_tokens: int = 0
    num_speculative_rows: int = 0

    @property
    def pipeline_stage(self) -> int | None:
        """This rank's pipeline stage, from 0; None if there is one stage."""
        if self.pipeline_parallel_size == 1:
            return None
        return self.rank * self.pipeline_parallel_size // self.world_size


@dataclass(frozen=True, slots=True)
class Worker:
    """The runner of steps, and the description that the scheduler asks for. `grammars`: what it may
    hold outputs to; None if it samples no tokens. `adapters`: None if it serves none.
    """

    runner: StepRunner
    description: WorkerDescription
    grammars: Grammars | None = None
    adapters: LoraAdapters | None = None
