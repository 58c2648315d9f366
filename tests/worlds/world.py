"""A random world: a replica, the requests that it receives, and other events."""

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
    """The next input of a session, which arrives at a tick, and the end of the turn."""

    tick: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at a tick, with its special properties."""

    tick: int
    name: str
    token_ids: tuple[int, ...]
    num_output: int
    """How many of the last `token_ids` are output that was already delivered."""
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    adapter: bytes = b""
    reads_prefix_cache: bool = True
    items: tuple[EncoderInput, ...] = ()
    grammar: StandInGrammar | None = None
    turns: tuple[Turn, ...] = ()
    """The turns of a session, in order."""
    close_at: int | None = None
    """The tick at which a session is ended. None if the request is not a session."""
    external: ExternalTokens | None = None
    send_steps: int | None = None
    abort_at: int | None = None
    must_start_within: int | None = None
    """The number of ticks after which the request is aborted if it was not scheduled."""
    program: DeclaredProgram | None = None
    tenant: bytes = b""
    nan_after: int | None = None
    """The number of output tokens after which the request's logits contain NaN."""
    breaks_workers_at: int | None = None
    """A position whose computation makes the workers fail."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return len(self.token_ids) - self.num_output


class Incident(enum.Enum):
    """Incidents caused by an operator or an accident."""

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
    """The workers are lost at a moment when no step reveals the loss."""
    BAD_TRANSACTION = "bad_transaction"
    """The pool receives a transaction that it must refuse."""
    DAMAGE_TIER = "damage_tier"
    """Blocks of the workers' tier are changed."""


@dataclass(frozen=True, slots=True)
class Event:
    """An incident at a tick. With `mid_plan` it occurs at the next transaction of a step after the
    tick. The meaning of `count` depends on the incident.
    """

    tick: int
    incident: Incident
    count: int = 0
    mid_plan: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """All random properties of one run of a replica."""

    number: int
    config: SchedulerConfig
    frees_are_awaited: bool
    arrivals: tuple[Arrival, ...]
    events: tuple[Event, ...]
    num_tier_blocks: int = 0
    """The number of blocks in the workers' offloading tier. 0 if there is no tier."""
    families: frozenset[str] = field(default_factory=frozenset)
    """The names of the world's features."""

    @property
    def last_tick(self) -> int:
        """The last tick with an external event."""
        ticks = [event.tick for event in self.events]
        for arrival in self.arrivals:
            ticks += [arrival.tick, arrival.abort_at or 0, arrival.close_at or 0]
            ticks += [turn.tick for turn in arrival.turns]
            ticks += [arrival.grammar.ready if arrival.grammar else 0]
        return max(ticks)
