"""A scheduler's description and state, as it sends them in its session."""

from dataclasses import dataclass

from services.gateway.core.request.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """The model and cache layout of a scheduler, as it announces them when a session opens."""

    model_name: str
    limits: ModelLimits
    fingerprint: bytes
    """Fingerprint of the model and the layout of its cache, the root of block hashes: 32 bytes."""
    tokenizer_fingerprint: bytes
    """32 bytes; empty where the worker has no tokenizer files."""
    block_size: int
    cache_node: str = ""
    """The name under which the directory knows its pool; empty: the directory does not."""
    kvpool_address: str = ""
    """Where the pool can be followed, as the scheduler reaches it."""
    pool_id: str = ""
    """The pool's name there."""
    max_num_seqs: int = 0
    """Most sequences that run at once; 0: it does not say."""
    hash_block_size: int | None = None
    """Tokens that one hash of a chain stands for, where those are fewer than a block's."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Whether a scheduler can run a step."""

    ready: bool
    reason: str = ""
    """Why it cannot, in one sentence; empty if it can."""
    draining: bool = False
    """Whether it takes no more requests, and finishes those it has."""
