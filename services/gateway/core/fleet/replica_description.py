"""The description and state that a scheduler sends to a gateway in their session, a gRPC stream."""

from dataclasses import dataclass

from services.gateway.core.request.model_limits import ModelLimits


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """The model and KV-cache layout of a scheduler, sent when the session opens."""

    model_name: str
    limits: ModelLimits
    fingerprint: bytes
    """Fingerprint of the model and its KV-cache layout, 32 bytes. It is the parent of a prompt's
    first block hash.
    """
    tokenizer_fingerprint: bytes
    """Fingerprint of the worker's tokenizer files, 32 bytes, or empty if the worker has none."""
    block_size: int
    cache_node: str = ""
    """The name of the scheduler's KV-cache pool in the directory of cached prefixes."""
    kvpool_address: str = ""
    """The address of the pool's service, which also publishes the pool's events."""
    pool_id: str = ""
    """The pool's id at `kvpool_address`."""
    max_num_seqs: int = 0
    """The limit on the number of running sequences, or 0 if it was not reported."""
    retains_contexts: bool = False
    """Whether the scheduler retains the KV blocks of an agent program's ended request for the
    program's next request. It then needs the name of the tool that the client runs in between.
    """
    hash_block_size: int | None = None
    """Number of tokens that one block hash covers, if it is smaller than the block size."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Whether a scheduler can run a step."""

    ready: bool
    reason: str = ""
    """Why the scheduler cannot run a step, as a sentence."""
    draining: bool = False
    """Whether the scheduler accepts no more requests, and only finishes the requests it has."""
    stalled: bool = False
    """Whether a draining scheduler cannot run steps."""

    @property
    def is_stalled(self) -> bool:
        """Whether no request gets tokens, because no step can run."""
        return self.stalled or not (self.ready or self.draining)
