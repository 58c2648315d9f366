"""The operations of a pool transaction and their outcome, shared by scheduler and kvpool.

An operation covers several requests. Its fields are parallel sequences with one item for each
request. An item *fits* if enough blocks are free for the item and its planned prefix hit has not
changed. A *context* consists of the published blocks that a released request leaves for a later
request. The blocks of contexts are reused after all other free blocks. stepwell.kvpool.v1 specifies
the fields. Types with an instance per step or per request are not frozen, since creating a frozen
instance takes three times as long.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.common.errors import InvalidArgument
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, ContextId, RequestKey

BlockTables = tuple[list[BlockId], ...]
"""Block ids of one request, one list for each KV-cache group."""


class MalformedTransaction(InvalidArgument):
    """An operation is invalid in any state of the pool. Nothing of the transaction is applied."""

    reason = "MALFORMED_TRANSACTION"


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Starts a step. Blocks published by earlier steps can be read in this step. Always fits. Only
    pools with state-space groups need this operation. In these pools an admission does not fit if
    its hit is a state that was published in the current step.
    """


@dataclass(frozen=True, slots=True)
class ReleaseCopies:
    """Removes the extra references that copies (`BlockCopy`) have on their blocks. Always fits. The
    oldest `num_copies` copies lose their references, or all copies if there are fewer. A step that
    reuses these blocks always runs after the step that makes the copies.
    """

    num_copies: int


@dataclass(frozen=True, slots=True)
class Release:
    """Frees all blocks of the requests and removes the requests from the pool. Always fits. Unknown
    requests are ignored. By default a request's blocks enter the free queue group by group. With
    `as_one_list`, they enter it together, the last group's blocks first.

    The published blocks of a request with a context are free and can be hit, but they are reused
    after all blocks that are in no context. The blocks of the newest context are reused last.
    """

    requests: Sequence[RequestKey]
    as_one_list: bool = False
    contexts: Sequence[ContextId] = ()
    """For each request, the new context of its blocks, or 0. Empty if all are 0."""


@dataclass(frozen=True, slots=True)
class RankContexts:
    """Sets the order in which the blocks of contexts are reused: the first of `contexts` first, and
    contexts that are not named last. Each context is reused from its end. Always fits. Unknown
    contexts are ignored.
    """

    contexts: Sequence[ContextId]


@dataclass(frozen=True, slots=True)
class DropContexts:
    """Ends contexts. Their free blocks stay cached, as if they were freed now in the order of
    `contexts`. Always fits. Unknown contexts are ignored.
    """

    contexts: Sequence[ContextId]


@dataclass(frozen=True, slots=True)
class RemoveSkippedBlocks:
    """Frees blocks that no query from position `num_computed_tokens` on can see. Always fits."""

    requests: Sequence[RequestKey]
    num_computed_tokens: Sequence[int]


@dataclass(slots=True)
class Grow:
    """Extends the block table of each request to the request's number of token slots. Each request
    gets all missing blocks or none. A table with enough slots stays unchanged.
    """

    requests: Sequence[RequestKey]
    num_computed_tokens: Sequence[int]
    """For each request, the number of tokens that are stored at the start of the step and will not
    be recomputed. Blocks that no query after these tokens can see are freed before new blocks are
    allocated. The freed blocks stay free even if the request does not fit.
    """
    num_slots: Sequence[int]
    num_tokens: Sequence[int] = ()
    """For each request, the number of tokens that are computed at the end of the step, draft tokens
    included. Empty if there are no lookahead slots, so that these numbers equal `num_slots`.
    """


@dataclass(slots=True)
class Commit:
    """Publishes blocks, that is, adds them to the prefix index under their hashes. Always fits.
    Blocks that end at or before the request's `num_tokens` are published.
    """

    requests: Sequence[RequestKey]
    num_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]
    """New hashes of each request, which continue the hash chain that the pool already has."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Looks up the longest cached prefixes of waiting requests. Always fits. No block is allocated.
    The pool keeps the requests' hashes until the requests are released.
    """

    requests: Sequence[RequestKey]
    max_hit_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]
    with_divergent_hits: bool = False
    """Whether the hit of the full-attention groups alone is also looked up."""


@dataclass(slots=True)
class Admission:
    """The conditions for admitting a request: an unchanged prefix hit, and enough free blocks."""

    request: RequestKey
    max_hit_tokens: int
    num_hit_tokens: int
    """Number of tokens of the planned hit."""
    num_slots: int
    """Number of token slots in the block tables after the admission."""
    num_commit_tokens: int
    """Blocks that end at or before this number of tokens are published."""
    num_reserve_slots: int
    """The admission fits only if there are enough hit and free blocks for this number of token
    slots, and `num_watermark_blocks` more free blocks. With 0, only `num_slots` counts. If the
    request already has blocks, its blocks outside windows do not count as free.
    """
    num_watermark_blocks: int = 0
    new_hashes: Sequence[BlockHash] = ()
    traceparent: str = ""
    """The request's trace context. Empty if the request is not sampled."""
    resumed: bool = False
    """Whether the request was preempted before. Hit statistics exclude resumed requests."""
    num_retained_blocks: int | None = None
    """Limit on the number of blocks in contexts that this admission and the transaction's earlier
    admissions may reuse. Hit blocks do not count. Blocks in contexts that this admission must keep
    free (`num_blocks_kept_free`) count. None means no limit.
    """
    num_external_tokens: int = 0
    """Number of tokens after the hit that the KV connector loads. These tokens need blocks and
    count as computed. If no slots follow them, they are loaded between steps, and their blocks must
    not be zeroed.
    """
    num_blocks_kept_free: int = 0
    """Number of blocks that must stay free after the blocks for `num_slots` are allocated."""
    holds_blocks: bool = False
    """Whether the request already has blocks, because it waited for a load by the KV connector. Its
    block tables are kept, nothing is looked up, and `num_hit_tokens` tokens count as computed.
    """
    num_tokens: int | None = None
    """Number of computed tokens after the step, draft tokens included. None means `num_slots`."""
    num_prompt_tokens: int = 0
    """Number of tokens in the prompt. Later requests are likely to extend the prompt."""
    shared_prefix_boundary: int = 0
    """The length in tokens of a longer prefix that some group had cached when the hit was planned,
    or 0. If this length has changed, the hit counts as changed, unless `diverges` is set.
    """
    diverges: bool = False
    """Whether only the full-attention groups have the whole hit. The connector loads the rest."""
    num_stored_tokens: int | None = None
    """Blocks that no query after this number of tokens can see are freed. None means
    `num_computed_tokens`. The number is smaller if the last computed tokens are computed again, or
    if steps in flight still read earlier blocks.
    """

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that no step has to compute, because they are hit or loaded."""
        return self.num_hit_tokens + self.num_external_tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """Admits requests in order. Each request can hit blocks that earlier admissions published."""

    admissions: Sequence[Admission]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Removes all hashes from the prefix index if no block is in use. Always fits."""


@dataclass(frozen=True, slots=True)
class EvictBlocks:
    """Removes the hashes of blocks whose contents do not match their hashes. Always fits."""

    block_ids: Sequence[BlockId]


Operation = (
    BeginStep
    | Release
    | RankContexts
    | DropContexts
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
    """A copy from one block of a group to another, which workers make before the step."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(slots=True)
class GroupBlocks:
    """Blocks of one group for several requests, with the block ids of all requests concatenated."""

    num_blocks: list[int]
    block_ids: list[BlockId]


@dataclass(slots=True)
class GrowResult:
    """For each group, the new blocks of the requests that grew."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The look-up results. Each list has one item for each request that was looked up."""

    num_hit_tokens: list[int]
    shared_prefix_boundaries: list[int]
    """Length in tokens of a longer prefix that only some groups have cached. 0 if there is none."""
    num_divergent_hit_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each request's divergent hit, which is the hit of the full-attention
    groups alone. If another group has a longer hit, the hit of all groups is used instead. Empty if
    divergent hits were not requested.
    """


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """The complete block tables of the admitted requests, for each group. Hit blocks are first."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCacheResult:
    """Whether the hashes were removed. They stay if any block is in use."""

    done: bool


OperationResult = GrowResult | LookupResult | AdmitResult | ResetPrefixCacheResult


class StopReason(enum.Enum):
    """Why a transaction stopped early."""

    NO_BLOCKS = "no_blocks"
    HIT_CHANGED = "hit_changed"
    RETAINED = "retained"
    """There are enough free blocks, but too many of them are in contexts."""
    KEPT_FREE = "kept_free"
    """There are enough free blocks, but fewer than `num_blocks_kept_free` would stay free."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The first item that did not fit. This item and all later items were not applied."""

    operation_index: int
    item_index: int
    reason: StopReason
    num_hit_tokens: int = 0
    """Number of tokens of the current hit if the hit has changed, otherwise 0."""
    shared_prefix_boundary: int = 0


@dataclass(frozen=True, slots=True)
class ContextBlocks:
    """The blocks that are left in a context."""

    context: ContextId
    num_blocks: int
    """Number of the context's blocks that were not reused. Some of them may be in use."""
    num_own_blocks: int
    """Number of the context's blocks that are free and in no other context."""


@dataclass(slots=True)
class Outcome:
    num_free_blocks: int
    results: tuple[OperationResult | None, ...] = ()
    """One result for each started operation, which is None if the operation has no result. If
    `stop` is set, the last result has only the items before the stop.
    """
    stop: Stop | None = None
    block_ids_to_zero: tuple[BlockId, ...] = ()
    """New attention blocks that workers must zero, in pools that also have state-space groups."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies that workers make in this order after they have zeroed blocks."""
    contexts: tuple[ContextBlocks, ...] = ()
    """The contexts that have changed since the last outcome."""
    num_retained_blocks: int = 0
    """Number of free blocks that are in contexts."""

    @property
    def grown(self) -> list[BlockTables]:
        """The new blocks of each request that grew, in the order of the operations."""
        return [
            tables
            for result in self.results
            if isinstance(result, GrowResult)
            for tables in block_tables(result.groups)
        ]

    @property
    def admitted(self) -> list[BlockTables]:
        """The complete block tables of each admitted request, with the hit blocks first."""
        results = [result for result in self.results if isinstance(result, AdmitResult)]
        return [tables for result in results for tables in block_tables(result.groups)]

    @property
    def hits(self) -> list[tuple[int, int]]:
        """The hit length and shared prefix boundary, in tokens, of each request looked up."""
        return [
            hit
            for result in self._lookups
            for hit in zip(result.num_hit_tokens, result.shared_prefix_boundaries, strict=True)
        ]

    @property
    def divergent_hits(self) -> list[int]:
        """The length of each request's divergent hit. Empty if these hits were not requested."""
        return [num for result in self._lookups for num in result.num_divergent_hit_tokens]

    @property
    def _lookups(self) -> list[LookupResult]:
        return [result for result in self.results if isinstance(result, LookupResult)]

    @property
    def reset_done(self) -> bool:
        """Whether every hash was removed."""
        return ResetPrefixCacheResult(done=True) in self.results


def block_tables(groups: Sequence[GroupBlocks]) -> list[BlockTables]:
    """Splits blocks that are packed per group into the tables of each request."""
    return list(zip(*map(_tables_of_group, groups), strict=True))


def _tables_of_group(group: GroupBlocks) -> list[list[BlockId]]:
    num_blocks, block_ids = group.num_blocks, group.block_ids
    if len(num_blocks) == len(block_ids) == num_blocks.count(1):
        return [[block_id] for block_id in block_ids]
    ends = accumulate(num_blocks)
    return [block_ids[end - count : end] for end, count in zip(ends, num_blocks, strict=True)]
