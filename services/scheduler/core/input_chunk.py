"""The input of a session's next turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash
from services.common.request.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class InputChunk:
    """Further prompt of a session, and how its next turn ends."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_time: float = 0.0
    request_id: str = ""
    """The id of the session in its next turn; empty: as before."""
    traceparent: str = ""
    """The caller's, for traces, as are the next two."""
    tracestate: str = ""
    baggage: str = ""
    queued_unix_nanos: int = 0
    """When it came to this replica."""
    block_hashes: Sequence[BlockHash] = ()
    """Those that the session has with it and lacks without it, if they were computed apart from the
    steps.
    """
