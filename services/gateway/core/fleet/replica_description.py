"""A scheduler's description and state, as sent in its session."""

from dataclasses import dataclass

from services.gateway.core.request.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """The model and cache layout of a scheduler, announced when a session opens."""

    model_name: str
    limits: ModelLimits
    fingerprint: bytes
    """Fingerprint of the model and its cache layout, 32 bytes. It is the root of block hashes."""
    tokenizer_fingerprint: bytes
    """The fingerprint of the tokenizer files, 32 bytes. It is empty if the worker has no such
    files.
    """
    block_size: int
    cache_node: str = ""
    """The pool's name in the directory of cached prefixes."""
    kvpool_address: str = ""
    """The address by which the scheduler reaches the pool. The pool publishes its events there."""
    pool_id: str = ""
    """The pool's id at `kvpool_address`."""
    max_num_seqs: int = 0
    """The limit on the number of running sequences. It is 0 if it was not reported."""
    retains_contexts: bool = False
    """Whether the scheduler retains contexts of programs, so that it uses the names of tools."""
    hash_block_size: int | None = None
    """Number of tokens that one block hash covers, if it is smaller than the block size."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Whether a scheduler can run a step."""

    ready: bool
    reason: str = ""
    """Why the scheduler cannot run a step, in one sentence."""
    draining: bool = False
    """Whether the scheduler accepts no more requests and finishes its present ones."""
    stalled: bool = False
    """Whether a draining scheduler cannot run steps."""

    @property
    def is_stalled(self) -> bool:
        """Whether no request gets tokens."""
        return self.stalled or not (self.ready or self.draining)
