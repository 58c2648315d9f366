"""A worker that is ready for steps, and its description."""

from dataclasses import dataclass

from services.worker.core.kv_groups import LayerGroup
from services.worker.core.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Model, capacity and identity: the fields of the contract's DescribeResponse.

    Block tables follow the order of `groups`. `fingerprint` is 32 bytes,
    `tokenizer_fingerprint` too, or empty where the model has no tokenizer files.
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
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Worker:
    """The runner of steps, and the description that the scheduler asks for."""

    runner: ModelRunner
    description: WorkerDescription
