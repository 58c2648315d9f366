"""The description of a world: a simulated replica, the requests that arrive, and other events."""

import enum
from dataclasses import dataclass, field

from services.common.request.encoder_input import EncoderInput
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from tests.scenarios.connector import ExternalTokens
from tests.scenarios.stand_in_grammar import StandInGrammar


@dataclass(frozen=True, slots=True)
class Turn:
    """A further turn of a session (a request that receives its input in turns): the tick at which
    its input arrives, and the input.
    """

    tick: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at a tick, and the events that happen to it."""

    tick: int
    name: str
    token_ids: tuple[int, ...]
    num_output: int
    """The number of last `token_ids` that are output tokens and were already delivered."""
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    adapter: bytes = b""
    reads_prefix_cache: bool = True
    items: tuple[EncoderInput, ...] = ()
    grammar: StandInGrammar | None = None
    turns: tuple[Turn, ...] = ()
    """The turns of a session after the first, in order."""
    close_at: int | None = None
    """The tick at which the client ends the session. None if the request is not a session."""
    external: ExternalTokens | None = None
    send_steps: int | None = None
    abort_at: int | None = None
    must_start_within: int | None = None
    """After how many ticks in the queue the request is aborted."""
    program: DeclaredProgram | None = None
    tenant: bytes = b""
    nan_after: int | None = None
    """The number of output tokens after which the request's logits contain NaN."""
    breaks_workers_at: int | None = None
    """The position in the sequence at which a step makes the workers fail."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output


class Incident(enum.Enum):
    """An event that an operator or a failure causes."""

    PAUSE_KEEP = "keep"
    PAUSE_WAIT = "wait"
    PAUSE_ABORT = "abort"
    RESUME = "resume"
    RESET = "reset"
    """A reset of the prefix cache, which is refused while requests have blocks."""
    RESET_RUNNING = "reset_running"
    """A reset of the prefix cache that preempts running requests first."""
    RESET_ENCODER_CACHE = "reset_encoder_cache"
    LOSE_WORKERS = "lose_workers"
    LOSE_POOL = "lose_pool"
    """The pool is lost after some more transactions."""
    REPORT_LOSS = "report_loss"
    """The loss of the workers is reported to the engine, instead of found by a step."""
    BAD_TRANSACTION = "bad_transaction"
    """The pool receives a transaction that it must refuse."""
    DAMAGE_TIER = "damage_tier"
    """Blocks in the workers' tier of host memory are changed."""


@dataclass(frozen=True, slots=True)
class Event:
    """An incident at a tick or, with `mid_plan`, at the pool's next transaction after the tick. The
    incident determines the meaning of `count`.
    """

    tick: int
    incident: Incident
    count: int = 0
    mid_plan: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """All random choices of one run of a replica."""

    number: int
    config: SchedulerConfig
    frees_are_awaited: bool
    arrivals: tuple[Arrival, ...]
    events: tuple[Event, ...]
    num_tier_blocks: int = 0
    """The number of blocks in the tier of host memory for offloaded KV blocks. 0 means no tier."""
    families: frozenset[str] = field(default_factory=frozenset)
    """The names of the world's features, from `FAMILIES`."""

    @property
    def last_tick(self) -> int:
        """The last tick with an external event."""
        ticks = [event.tick for event in self.events]
        for arrival in self.arrivals:
            ticks += [arrival.tick, arrival.abort_at or 0, arrival.close_at or 0]
            ticks += [turn.tick for turn in arrival.turns]
            ticks += [arrival.grammar.ready if arrival.grammar else 0]
        return max(ticks)
