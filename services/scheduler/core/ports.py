"""What the scheduler needs of others, in its own words: a pool of blocks, and someone who computes.

The operations mirror stepwell.kvpool.v1, where their effect is specified in full.
"""

from asyncio import Future
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.common.block_hash import BlockHash
from services.common.errors import Unavailable
from services.scheduler.core.output import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
)
from services.scheduler.core.request import Request

BlockTables = tuple[list[int], ...]
"""Block ids for each KV-cache group."""


class PoolLost(Unavailable):
    """The pool's generation is over: every block table is void."""

    reason = "POOL_LOST"


class WorkersLost(Unavailable):
    """The workers' generation is over: every key and value they stored is gone."""

    reason = "WORKERS_LOST"


@dataclass(frozen=True, slots=True)
class Release:
    """Gives back all blocks of requests and forgets them. Always fits."""

    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Grow:
    """Extends block tables to `num_slots` tokens each; stops at the first that does not fit."""

    keys: Sequence[int]
    num_computed_tokens: Sequence[int]
    num_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """Publishes full blocks below `num_tokens`. Always fits."""

    keys: Sequence[int]
    num_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks for the longest cached prefix, at most `max_hit_tokens` long. Holds nothing."""

    keys: Sequence[int]
    max_hit_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Admission:
    """The terms on which one waiting request gets its blocks."""

    key: int
    max_hit_tokens: int
    num_hit_tokens: int
    num_slots: int
    num_commit_tokens: int
    num_reserve_slots: int
    num_watermark_blocks: int
    num_new_tokens: int = 0
    """Tokens that its first step computes, drafts left out; nothing to the pool. Those up to
    `num_commit_tokens` can be found by others at once, the rest when a Commit says so.
    """
    num_drafts: int = 0
    """Empty drafts that pad its first step; part of the slots, nothing to the pool."""
    traceparent: str = ""
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Admits requests in order, each seeing what earlier ones published; stops at a misfit."""

    admissions: Sequence[Admission]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forgets every hash, if no block is in use."""


Operation = Release | Grow | Commit | Lookup | Admit | ResetPrefixCache


class StopReason(Enum):
    """Why a transaction stopped early."""

    NO_BLOCKS = "no_blocks"
    HIT_CHANGED = "hit_changed"


@dataclass(frozen=True, slots=True)
class Stop:
    """The first item that did not fit; it and what follows changed nothing."""

    operation_index: int
    item_index: int
    reason: StopReason
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a transaction. Each list covers what was done, in the order asked for."""

    num_free_blocks: int
    stop: Stop | None = None
    grown: list[BlockTables] = field(default_factory=list)
    """New blocks of each grown request."""
    hits: list[int] = field(default_factory=list)
    """Cached tokens of each request looked up."""
    admitted: list[BlockTables] = field(default_factory=list)
    """Full block table of each admitted request, hits first."""
    reset_done: bool = False
    block_ids_to_zero: Sequence[int] = ()
    """Blocks that were handed out and must be cleared before they are used."""


class KVPool(Protocol):
    """The memory of one replica."""

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        """Executes operations in order, up to the first that does not fit; exactly once.

        Raises PoolLost when the generation is over.
        """


class Executor(Protocol):
    """The workers of one replica, as one."""

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> Future[ModelRunnerOutput]:
        """Sends a step to every rank; what it returns resolves when the step is done. It may be
        cancelled by whoever needs it no more.

        Steps run in the order of the calls. Both raise WorkersLost when the generation is over.
        """


class Replica(Protocol):
    """The pool and the workers, as a pair that lives and dies together."""

    async def reopen(self) -> None:
        """Begins a new generation with an empty pool and empty workers, as soon as both are there.

        Waits for them as long as it takes.
        """


class Readiness(Protocol):
    """Those who are told whether a step can run. Never blocks."""

    def ready(self) -> None:
        """Pool and workers are there."""

    def not_ready(self, reason: str) -> None:
        """Pool or workers are away; `reason` says which, in one sentence."""


class Delivery(Protocol):
    """The way back to those who wait for tokens."""

    def deliver(self, update: EngineCoreOutputs) -> None:
        """Passes on the new tokens and the ends that a step brought. Never blocks."""

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        """Passes on ends between steps. Never blocks."""


class StepObserver(Protocol):
    """Someone who watches the engine, for traces and metrics. Changes nothing, never blocks."""

    def arrived(self, requests: Sequence[Request]) -> None:
        """Requests were queued."""

    def begin(self) -> str:
        """A step is about to be planned; returns its trace context, "" when it is not traced."""

    def planned(self, plan: SchedulerOutput) -> None:
        """The step is decided and about to be sent."""

    def done(self, plan: SchedulerOutput, updates: Iterable[EngineCoreOutput]) -> None:
        """The step's tokens are in."""

    def ended(self, requests: Sequence[Request]) -> None:
        """Requests were aborted between steps."""

    def paused(self) -> None:
        """No step is planned until `resumed`. May be told again."""

    def resumed(self) -> None:
        """Steps are planned again. May be told again."""

    def preempted(self, requests: Sequence[Request]) -> None:
        """An operator sent running requests back to the queue."""

    def lost(self, preempted: Sequence[Request]) -> None:
        """Steps that are not done came to nothing: pool or workers are lost, or the engine ends."""
