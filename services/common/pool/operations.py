"""The operations of a pool transaction and their outcome, as scheduler and kvpool both use them.

An operation is of several requests, in parallel sequences. stepwell.kvpool.v1 specifies the fields.
What is made in most steps, or for each request, is not frozen: that would take thrice the time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, RequestKey

BlockTables = tuple[list[BlockId], ...]
"""Block ids of one request, one list for each KV-cache group."""


class MalformedTransaction(InvalidArgument):
    """An operation is invalid in any state of the pool; nothing of the transaction is done."""

    reason = "MALFORMED_TRANSACTION"


@dataclass(frozen=True, slots=True)
class BeginStep:
    """A step begins: what was published before is stored when it runs. Always fits. Only states
    need it: a request that finds a state which the present step publishes does not fit.
    """


@dataclass(frozen=True, slots=True)
class ReleaseCopies:
    """Lets go of the blocks of the first `num_copies` copies that still hold theirs, or of all if
    those are fewer: nothing comes before the step that makes them. Always fits.
    """

    num_copies: int


@dataclass(frozen=True, slots=True)
class Release:
    """Frees all blocks of the requests and removes them from the pool, if it knows them. Always
    fits. Groups are freed one after the other; `as_one_list`: all blocks of a request enter the
    free queue together, those of the last group first.
    """

    requests: Sequence[RequestKey]
    as_one_list: bool = False


@dataclass(frozen=True, slots=True)
class RemoveSkippedBlocks:
    """Frees the blocks of requests that no query from `num_computed_tokens` on can see, as a Grow
    does. A request that holds no blocks is passed over. Always fits.
    """

    requests: Sequence[RequestKey]
    num_computed_tokens: Sequence[int]


@dataclass(slots=True)
class Grow:
    """Extends block tables to `num_slots` token slots each. Each request gets all or none. A table
    with that many slots stays as it is.
    """

    requests: Sequence[RequestKey]
    num_computed_tokens: Sequence[int]
    """Tokens that are stored when the step begins, and will stay: blocks that no later query sees
    are freed first, and stay free even if the request then does not fit.
    """
    num_slots: Sequence[int]
    num_tokens: Sequence[int] = ()
    """Tokens that are computed when the step ends, drafts included; empty: as many as slots, which
    is so without lookahead.
    """


@dataclass(slots=True)
class Commit:
    """Publishes the blocks that lie wholly below `num_tokens`. Always fits."""

    requests: Sequence[RequestKey]
    num_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]
    """The hashes that follow those which the pool has of each request's chain."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks for the longest cached prefix of waiting requests, in whole blocks. Always fits. No
    block is held; the pool keeps the hashes until the request is released.
    """

    requests: Sequence[RequestKey]
    max_hit_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]
    with_divergent_hits: bool = False
    """Also asks for the hit of full attention alone, where states are cached less far."""


@dataclass(slots=True)
class Admission:
    """The conditions on which one waiting request gets its blocks. It fits if the prefix hit still
    is the one that was planned with, and if enough blocks are free.
    """

    request: RequestKey
    max_hit_tokens: int
    num_hit_tokens: int
    """The planned hit."""
    num_slots: int
    """Token slots that the block tables hold then."""
    num_commit_tokens: int
    """Blocks wholly below are published."""
    num_reserve_slots: int
    """Token slots, hits included, for which blocks must be free, so that `num_watermark_blocks`
    stay free besides; 0: no more than `num_slots`. Of a request that holds blocks these are counted
    before windows give back what it no longer sees.
    """
    num_watermark_blocks: int = 0
    new_hashes: Sequence[BlockHash] = ()
    traceparent: str = ""
    """The request's trace context; "" if it is not sampled."""
    resumed: bool = False
    """Whether the request was preempted: it is left out of the hit statistics."""
    num_external_tokens: int = 0
    """Tokens after the hit that are loaded from elsewhere: they need blocks and count as computed.
    If no slots follow them, they are loaded between steps, and their blocks are not to be cleared.
    """
    num_blocks_kept_free: int = 0
    """Blocks that must stay free besides those taken now, not besides those reserved."""
    holds_blocks: bool = False
    """Whether the request waited for such a load with its blocks, and keeps its tables: nothing is
    looked up, and `num_hit_tokens` of it are computed.
    """
    num_tokens: int | None = None
    """As `Grow.num_tokens`; None: as many as slots."""
    num_prompt_tokens: int = 0
    """Where later requests are likely to continue."""
    shared_prefix_boundary: int = 0
    """That of the planned hit: another one is another hit, unless it diverges."""
    diverges: bool = False
    """Whether the hit is one of full attention: what other groups lack of it is also loaded."""
    num_stored_tokens: int | None = None
    """Tokens to which windows move on, where fewer than are computed: the rest is computed again,
    or steps in flight still read what lies before it.
    """

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that need not be computed: the hit, and what is loaded from elsewhere."""
        return self.num_hit_tokens + self.num_external_tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """Admits requests one after another; each sees what earlier ones published."""

    admissions: Sequence[Admission]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Removes every hash, if no block is in use. Always fits."""


@dataclass(frozen=True, slots=True)
class EvictBlocks:
    """Removes the hashes of these blocks, which requests hold: what is stored in them is not what
    their hash says. Blocks that are free, or have no hash, are passed over. Always fits.
    """

    block_ids: Sequence[BlockId]


Operation = (
    BeginStep
    | Release
    | RemoveSkippedBlocks
    | Grow
    | Commit
    | Lookup
    | Admit
    | ResetPrefixCache
    | EvictBlocks
    | ReleaseCopies
)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of a group whose contents the workers copy to another before the step."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(slots=True)
class GroupBlocks:
    """Blocks of one group for several requests: the number for each, and their ids end to end."""

    num_blocks: list[int]
    block_ids: list[BlockId]


@dataclass(slots=True)
class GrowResult:
    """The new blocks of each group, for the requests that grew."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is cached of each request's prompt, in tokens; the lists are parallel."""

    num_hit_tokens: list[int]
    shared_prefix_boundaries: list[int]
    """Where a prefix ends that some group has cached further than the hit; 0 if none has."""
    num_divergent_hit_tokens: list[int] = field(default_factory=list)
    """If they were asked for: those that full attention has cached where all other groups have no
    more, else as many as in the hit.
    """


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """The full block tables of each group, hits first, for the requests that were admitted."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCacheResult:
    """Whether the hashes were removed; if not, blocks are in use and nothing was changed."""

    done: bool


OperationResult = GrowResult | LookupResult | AdmitResult | ResetPrefixCacheResult


class StopReason(enum.Enum):
    """Why a transaction stopped early."""

    NO_BLOCKS = "no_blocks"
    HIT_CHANGED = "hit_changed"


@dataclass(frozen=True, slots=True)
class Stop:
    """The first item that did not fit: nothing of it was done, nor of anything after it."""

    operation_index: int
    item_index: int
    reason: StopReason
    num_hit_tokens: int = 0
    """Those of the present hit if it has changed, else 0, as `shared_prefix_boundary`."""
    shared_prefix_boundary: int = 0


@dataclass(slots=True)
class Outcome:
    """The outcome of a transaction."""

    num_free_blocks: int
    results: tuple[OperationResult | None, ...] = ()
    """One for each operation that was begun, None where it returns nothing; the last is partial if
    there is a `stop`.
    """
    stop: Stop | None = None
    block_ids_to_zero: tuple[BlockId, ...] = ()
    """Blocks of attention, beside state-space layers, that workers clear before their use."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies that workers make after that, in order."""

    @property
    def grown(self) -> list[BlockTables]:
        """New blocks of each request that grew, in the order of the operations."""
        return [
            tables
            for result in self.results
            if isinstance(result, GrowResult)
            for tables in block_tables(result.groups)
        ]

    @property
    def admitted(self) -> list[BlockTables]:
        """Full block tables of each admitted request, hits first."""
        return [
            tables
            for result in self.results
            if isinstance(result, AdmitResult)
            for tables in block_tables(result.groups)
        ]

    @property
    def hits(self) -> list[tuple[int, int]]:
        """Cached tokens of each request that was looked up, and its shared prefix boundary."""
        return [
            hit
            for result in self.results
            if isinstance(result, LookupResult)
            for hit in zip(result.num_hit_tokens, result.shared_prefix_boundaries, strict=True)
        ]

    @property
    def divergent_hits(self) -> list[int]:
        """Divergent hits of each request that was looked up, if they were asked for."""
        return [
            num_tokens
            for result in self.results
            if isinstance(result, LookupResult)
            for num_tokens in result.num_divergent_hit_tokens
        ]

    @property
    def reset_done(self) -> bool:
        """Whether every hash was removed."""
        return ResetPrefixCacheResult(done=True) in self.results


def block_tables(groups: Sequence[GroupBlocks]) -> list[BlockTables]:
    """The blocks of each request, from blocks packed per group."""
    return list(zip(*map(_tables_of_group, groups), strict=True))


def _tables_of_group(group: GroupBlocks) -> list[list[BlockId]]:
    """The blocks of each request in one group; in most steps each one has a single block."""
    num_blocks, block_ids = group.num_blocks, group.block_ids
    if len(num_blocks) == len(block_ids) == num_blocks.count(1):
        return [[block_id] for block_id in block_ids]
    ends = accumulate(num_blocks)
    return [block_ids[end - count : end] for end, count in zip(ends, num_blocks, strict=True)]
