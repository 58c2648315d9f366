"""A random world: a replica, the requests that come to it, and what happens to it meanwhile."""

import enum
from dataclasses import dataclass, field

from services.cli.replay.scenarios.stand_in_connector import ExternalTokens
from services.cli.replay.scenarios.stand_in_grammar import StandInGrammar
from services.common.request.encoder_input import EncoderInput
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Turn:
    """The next input of a session, and how the turn ends. It comes at a tick."""

    tick: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a tick, and what is particular about it."""

    tick: int
    name: str
    token_ids: tuple[int, ...]
    num_output: int
    """How many of them are output already delivered."""
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    adapter: bytes = b""
    reads_prefix_cache: bool = True
    items: tuple[EncoderInput, ...] = ()
    grammar: StandInGrammar | None = None
    turns: tuple[Turn, ...] = ()
    """Of a session, in order."""
    close_at: int | None = None
    """When a session is ended; None: the request is no session."""
    external: ExternalTokens | None = None
    send_steps: int | None = None
    abort_at: int | None = None
    must_start_within: int | None = None
    """Ticks after which it is given up if it was not scheduled."""
    nan_after: int | None = None
    """Output tokens after which its logits hold NaN."""
    breaks_workers_at: int | None = None
    """A position whose computation loses the workers."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens are prompt."""
        return len(self.token_ids) - self.num_output


class Incident(enum.Enum):
    """What an operator or an accident does to a replica."""

    PAUSE_KEEP = "keep"
    PAUSE_WAIT = "wait"
    PAUSE_ABORT = "abort"
    RESUME = "resume"
    RESET = "reset"
    """The cached prefixes are forgotten, unless requests hold blocks."""
    RESET_RUNNING = "reset_running"
    """Running requests are preempted first."""
    RESET_ENCODER_CACHE = "reset_encoder_cache"
    LOSE_WORKERS = "lose_workers"
    LOSE_POOL = "lose_pool"
    """The pool is lost after some more transactions."""
    REPORT_LOSS = "report_loss"
    """Workers are lost while no step shows it."""
    BAD_TRANSACTION = "bad_transaction"
    """The pool is sent what it must refuse."""
    DAMAGE_TIER = "damage_tier"
    """Blocks of the workers' tier change."""


@dataclass(frozen=True, slots=True)
class Event:
    """An incident at a tick: with `mid_plan`, at the next transaction that a step makes after it;
    `count` is of the incident.
    """

    tick: int
    incident: Incident
    count: int = 0
    mid_plan: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """Everything that is random of one life of a replica."""

    number: int
    config: SchedulerConfig
    frees_are_awaited: bool
    arrivals: tuple[Arrival, ...]
    events: tuple[Event, ...]
    num_tier_blocks: int = 0
    """Of the workers' tier of offloaded blocks; 0: they have none."""
    families: frozenset[str] = field(default_factory=frozenset)
    """What is in it, by name."""

    @property
    def last_tick(self) -> int:
        """The last one at which something comes from outside."""
        ticks = [event.tick for event in self.events]
        for arrival in self.arrivals:
            ticks += [arrival.tick, arrival.abort_at or 0, arrival.close_at or 0]
            ticks += [turn.tick for turn in arrival.turns]
            ticks += [arrival.grammar.ready if arrival.grammar else 0]
        return max(ticks)
