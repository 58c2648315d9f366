"""The operations of a pool transaction and their outcome, as scheduler and kvpool both use them.

An operation is of several requests, in parallel sequences. stepwell.kvpool.v1 specifies the fields.
What is made in most steps, or for each request, is not frozen: that would take thrice the time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.common.block_hash import BlockHash
from services.common.errors import InvalidArgument
from services.common.ids import BlockId, RequestKey

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
    """The first so many copies whose blocks are still held, or all if those are fewer, need not
    hold them any longer: nothing comes before the step that makes them. Always fits.
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
    """Extends block tables to `num_slots` token slots each. Each request gets all or none.

    A table with that many slots stays as it is. `num_computed_tokens` are stored when the step
    begins, and will stay: blocks that no later query sees are freed first, and stay free even if
    the request then does not fit. `num_tokens` are computed when the step ends, drafts included,
    which are the slots without lookahead; left out where that is all of them.
    """

    requests: Sequence[RequestKey]
    num_computed_tokens: Sequence[int]
    num_slots: Sequence[int]
    num_tokens: Sequence[int] = ()


@dataclass(slots=True)
class Commit:
    """Publishes the blocks that lie wholly below `num_tokens`. Always fits. `new_hashes` continue
    what the pool has of each chain.
    """

    requests: Sequence[RequestKey]
    num_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks for the longest cached prefix of waiting requests, in whole blocks. Always fits. No
    block is held; the pool keeps the hashes until the request is released. `with_divergent_hits`:
    also for the hit of full attention, where states are cached less far.
    """

    requests: Sequence[RequestKey]
    max_hit_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]
    with_divergent_hits: bool = False


@dataclass(slots=True)
class Admission:
    """The conditions on which one waiting request gets its blocks.

    It fits if the prefix hit still is `num_hit_tokens`, with the same `shared_prefix_boundary`
    unless it `diverges`, and if `num_reserve_slots` token slots, hits included, could be had with
    `num_watermark_blocks` left free. Then the table holds `num_slots`, and the blocks wholly below
    `num_commit_tokens` are published. A `resumed` request is left out of the hit statistics.
    `traceparent` is the request's trace context, "" if it is not sampled. `num_tokens` are computed
    when the step ends, drafts included, which are the slots without lookahead; None where that is
    all of them. `num_prompt_tokens` say where later requests are likely to continue.

    `num_external_tokens` after the hit are loaded from elsewhere: they need blocks and count as
    computed. `num_blocks_kept_free` must stay free besides the blocks that are taken now, not
    besides those reserved. If no slots follow them, they are loaded between steps, and their blocks
    are not to be cleared. A request that `holds_blocks`, because it waited for such a load, keeps
    its table: nothing is looked up, and `num_hit_tokens` of it are computed. A `diverges` hit is
    one of full attention; what other groups lack of it is among what is loaded.

    Windows move on to `num_stored_tokens`, where those are fewer than are computed: the rest is
    computed again, or steps in flight still read what lies before it.
    """

    request: RequestKey
    max_hit_tokens: int
    num_hit_tokens: int
    num_slots: int
    num_commit_tokens: int
    num_reserve_slots: int
    num_watermark_blocks: int = 0
    new_hashes: Sequence[BlockHash] = ()
    traceparent: str = ""
    resumed: bool = False
    num_external_tokens: int = 0
    num_blocks_kept_free: int = 0
    holds_blocks: bool = False
    num_tokens: int | None = None
    num_prompt_tokens: int = 0
    shared_prefix_boundary: int = 0
    diverges: bool = False
    num_stored_tokens: int | None = None

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
    """Cached tokens of each request's prompt. `shared_prefix_boundaries`: where a prefix ends that
    some group has cached further, 0 if none has; parallel. `num_divergent_hit_tokens`: if they
    were asked for, those that full attention has cached where all other groups have no more, else
    as many as in the hit; parallel.
    """

    num_hit_tokens: list[int]
    shared_prefix_boundaries: list[int]
    num_divergent_hit_tokens: list[int] = field(default_factory=list)


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
    """The first item that did not fit: nothing of it was done, nor of anything after it.
    `num_hit_tokens` and `shared_prefix_boundary` are those of the present hit if it has changed,
    else 0.
    """

    operation_index: int
    item_index: int
    reason: StopReason
    num_hit_tokens: int = 0
    shared_prefix_boundary: int = 0


@dataclass(slots=True)
class Outcome:
    """The outcome of a transaction.

    `results` has one for each operation that was begun, None where it returns nothing; the last is
    partial if there is a `stop`. `block_ids_to_zero` (of attention beside state-space layers) must
    be cleared before use, and then the `copies` made, in order.
    """

    num_free_blocks: int
    results: tuple[OperationResult | None, ...] = ()
    stop: Stop | None = None
    block_ids_to_zero: tuple[BlockId, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

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
