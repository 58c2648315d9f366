"""Programs (the work of simulated clients) that have begun, and their requests that were sent."""

from dataclasses import dataclass, field
from functools import lru_cache

from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.gateway.core.request.inflight import Inflight
from services.scheduler.core.request import Request
from services.simulation.laboratory.programs import Context, Program, Turn


@lru_cache(maxsize=1 << 16)
def sampling_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@dataclass(slots=True, eq=False)
class LiveProgram:
    program: Program
    began: float
    context: Context
    parent: "LiveProgram | None" = None
    num_turns: int = 0
    num_subagents: int = 0
    """Number of subagents that have not ended."""
    next_use: float = 0.0
    """The time at which the next request will be sent. While a request waits or runs, it is the
    time at which that request was sent. After the last request, it is infinity.
    """
    noted_at: float = 0.0
    """The time up to which the accounts include this program's tokens."""
    known: dict[str, int] = field(default_factory=dict)
    """Maps a replica to the number of the program's tokens that the replica has computed."""


@dataclass(slots=True, eq=False)
class SentTurn:
    """A request that was sent for a turn."""

    live: LiveProgram
    turn: Turn
    number: int
    prompt: list[int]
    arrived: float
    own_token: int
    """The token of which the whole answer consists."""
    request_id: str
    priority: int
    handle: int = 0
    inflight: Inflight = None  # type: ignore[assignment]
    num_cached: int = 0
    admitted: float = -1.0
    first_token: float = -1.0

    def make_request(self, key: RequestKey, now: float) -> Request:
        return Request(
            self.request_id,
            key,
            list(self.prompt),
            len(self.prompt),
            sampling_of(self.turn.num_output_tokens),
            priority=self.priority,
            arrival_time=now,
            block_hashes=list(self.live.context.hashes),
        )
