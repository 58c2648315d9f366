"""What can be asked of a pool in one transaction, and what comes of it.

Requests come in parallel sequences, as on the wire: one operation speaks for a whole batch.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.block_hash import BlockHash
from services.kvpool.core.ids import BlockId, RequestNumber


@dataclass(frozen=True, slots=True)
class Release:
    """Gives back all blocks of the requests and forgets them. Always fits.

    A request that the pool does not know is passed over.
    """

    requests: Sequence[RequestNumber]


@dataclass(frozen=True, slots=True)
class Grow:
    """Extends block tables to `num_slots` token slots each. Fits per request: all or nothing.

    A table that holds as much already stays as it is. `num_computed_tokens` says what is stored
    when the step begins, and will stay: blocks that no later query sees are given back first, and
    stay given back even if the request then does not fit.
    """

    requests: Sequence[RequestNumber]
    num_computed_tokens: Sequence[int]
    num_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """Publishes the blocks that lie wholly below `num_tokens`. Always fits.

    `new_hashes` holds for each request what continues its chain.
    """

    requests: Sequence[RequestNumber]
    num_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks for the longest cached prefix, in whole blocks, of waiting requests. Always fits.

    Nothing is held. The hashes are remembered until the request is released.
    """

    requests: Sequence[RequestNumber]
    max_hit_tokens: Sequence[int]
    new_hashes: Sequence[Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Admission:
    """The terms on which one waiting request gets its blocks.

    It fits if the prefix hit still is `num_hit_tokens`, and if `num_reserve_slots` token slots,
    hits counted in, could be had with `num_watermark_blocks` left free. Then the table holds
    `num_slots`, and the blocks wholly below `num_commit_tokens` are published, be it all that the
    step computes or less, for a Commit to publish later. A `resumed` one is kept out of the hit
    statistics.
    """

    request: RequestNumber
    max_hit_tokens: int
    num_hit_tokens: int
    num_slots: int
    num_commit_tokens: int
    num_reserve_slots: int
    num_watermark_blocks: int = 0
    new_hashes: Sequence[BlockHash] = ()
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Admits requests one after another, each seeing what earlier ones published."""

    admissions: Sequence[Admission]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forgets every hash, if no block is in use. Always fits."""


Operation = Release | Grow | Commit | Lookup | Admit | ResetPrefixCache


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group for several requests: how many for each, and their ids end to end."""

    num_blocks: list[int]
    block_ids: list[BlockId]


@dataclass(frozen=True, slots=True)
class GrowResult:
    """The new blocks of each group, for the requests that grew."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Cached tokens of each request's prompt."""

    num_hit_tokens: list[int]


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """The full block tables of each group, hits first, for the requests that were admitted."""

    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCacheResult:
    """Whether the hashes are gone; if not, blocks are in use and nothing was changed."""

    done: bool


OperationResult = GrowResult | LookupResult | AdmitResult | ResetPrefixCacheResult


class StopReason(enum.Enum):
    """Why a transaction stopped early."""

    NO_BLOCKS = "no_blocks"
    HIT_CHANGED = "hit_changed"


@dataclass(frozen=True, slots=True)
class Stop:
    """The first item that did not fit: nothing of it was done, nor of anything after it.

    `num_hit_tokens` is the hit there is now, where it had changed.
    """

    operation_index: int
    item_index: int
    reason: StopReason
    num_hit_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a transaction.

    One result for each operation that was begun, None where the operation returns nothing; the
    last one is partial if there is a `stop`. `block_ids_to_zero` were handed out and must be
    cleared before they are used: none without state-space layers.
    """

    results: tuple[OperationResult | None, ...]
    stop: Stop | None
    num_free_blocks: int
    block_ids_to_zero: tuple[BlockId, ...] = ()
