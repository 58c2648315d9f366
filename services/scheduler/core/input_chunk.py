"""The input of a session's next turn. A session is a request with several turns."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash
from services.common.request.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class InputChunk:
    """The prompt tokens that a session's next turn appends, and the turn's sampling parameters."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    arrival_time: float = 0.0
    request_id: str = ""
    """The session's request id from the next turn on. Empty if it does not change."""
    traceparent: str = ""
    """`traceparent`, `tracestate` and `baggage` are the client's trace context."""
    tracestate: str = ""
    baggage: str = ""
    queued_unix_nanos: int = 0
    """Time at which the chunk arrived at this replica, in Unix nanoseconds."""
    block_hashes: Sequence[BlockHash] = ()
    """Hashes of the session's blocks that this chunk fills. Empty if not computed yet."""
