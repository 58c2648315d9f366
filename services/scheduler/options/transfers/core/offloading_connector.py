"""A KV connector that offloads blocks to host memory of the workers, which is called the tier.
Blocks stay in the tier after the KV cache has evicted them. Named after vLLM's OffloadingConnector.

The scheduler decides which blocks are in the tier, and the workers copy the blocks. A full block of
a request is copied to the tier with the first step that is planned after the block's tokens are
known and computed. The workers make the copy before this step writes any block. Blocks of the tier
that continue a prefix hit in the KV cache are loaded between steps. A reset of the pool does not
change the tier or its index. The index is cleared when the process of a worker is new, because the
tier is then empty.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core import kv_transfer
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch, KVConnector
from services.scheduler.options.transfers.core.tier_index import TierIndex, tier_key


@dataclass(slots=True)
class TierStats:
    """Totals since the process started. As in vLLM, only tokens of admitted requests count."""

    num_query_tokens: int = 0
    """Number of tokens, after prefix hits in the KV cache, that were looked up in the tier."""
    num_hit_tokens: int = 0
    """Number of these tokens that were loaded from the tier."""
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_invalid_blocks: int = 0
    """Number of blocks that could not be loaded, because they were missing or damaged."""


@dataclass(frozen=True, slots=True)
class _Stores:
    """Copies to the tier that begin with a step. They are uncertain until its output arrives."""

    step: int
    blocks: tuple[kv_transfer.BlockTransfer, ...]


class OffloadingConnector(KVConnector):
    """A connector to the workers' tier. A block is copied to the tier before it can get another
    owner. All KV-cache groups must have the same block size and hash block size.
    """

    def __init__(self, config: SchedulerConfig, num_tier_blocks: int) -> None:
        self.index = TierIndex(num_tier_blocks)
        self.stats = TierStats()
        self._fingerprint = config.fingerprint
        self._size = config.block_size
        groups = config.all_groups
        self._groups: Sequence[KVCacheGroup] = groups
        self._full = [
            number
            for number, group in enumerate(groups)
            if group.attention_type is AttentionType.FULL
        ]
        self._windows = [number for number in range(len(groups)) if number not in self._full]
        self._num_stored: dict[Request, int] = {}
        """Maps a request to the number of leading blocks that were already offered for storing."""
        self._num_asked: dict[Request, int] = {}
        """Maps a waiting request to its number of tokens after the prefix hit in the KV cache."""
        self._stores: dict[kv_transfer.TierBlockId, kv_transfer.BlockTransfer] = {}
        """Copies to the tier that begin with the next step, by block of the tier. If a block of the
        tier gets another key before this step, only the last copy remains.
        """
        self._loads: list[kv_transfer.ConnectorLoad] = []
        self._uncertain: deque[_Stores] = deque()
        self._loading: dict[RequestKey, kv_transfer.ConnectorLoad] = {}

    # Methods of KVConnector

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        request.hash_full_blocks(self._fingerprint, self._size)
        self._num_asked[request] = request.num_tokens - num_computed_tokens
        begin = num_computed_tokens // self._size
        end = self._longest(request, begin)
        while end > begin and not self._has_windows(request, begin, end):
            end -= 1
        return ExternalMatch((end - begin) * self._size, is_async=True)

    def update_state_after_alloc(
        self, request: Request, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        num_asked = self._num_asked.pop(request, 0)
        if not request.num_preemptions:
            self.stats.num_query_tokens += num_asked
            self.stats.num_hit_tokens += num_external_tokens
        if num_external_tokens:
            end = request.num_computed_tokens // self._size
            begin = end - num_external_tokens // self._size
            transfers = tuple(
                kv_transfer.BlockTransfer(block, self.index.pin(key), key)
                for key, block in self._keys(request, blocks, begin, end)
            )
            load = self._loading[request.key] = kv_transfer.ConnectorLoad(request.key, transfers)
            self._loads.append(load)

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        request.hash_full_blocks(self._fingerprint, self._size)
        begin = self._num_stored.get(request, 0)
        end = min(num_tokens // self._size, len(request.block_hashes))
        if end <= begin:
            return
        self._num_stored[request] = end
        # A sequence's first blocks are touched last, so that its last blocks are evicted first.
        for key, block in reversed(list(self._keys(request, blocks, begin, end))):
            if key in self.index:
                self.index.touch(key)
            elif (tier_block := self.index.put(key)) is not None:
                self._stores[tier_block] = kv_transfer.BlockTransfer(block, tier_block, key)

    def blocks_released(self, request: Request) -> None:
        self._num_stored.pop(request, None)
        self._num_asked.pop(request, None)

    def build_connector_meta(self, step: int) -> kv_transfer.KVConnectorMetadata | None:
        if not (self._stores or self._loads):
            return None
        stores, loads = tuple(sorted(self._stores.values())), tuple(self._loads)
        self._stores, self._loads = {}, []
        if stores:
            self._uncertain.append(_Stores(step, stores))
        return kv_transfer.KVConnectorMetadata(stores, loads)

    def update_connector_output(self, step: int, results: kv_transfer.KVTransferResults) -> None:
        while self._uncertain and self._uncertain[0].step <= step:
            self.stats.num_stored_blocks += len(self._uncertain.popleft().blocks)
        for request in results.finished_recving:
            if (load := self._loading.pop(request, None)) is not None:
                self._end_load(load, results.invalid_block_ids)

    def forget(self) -> None:
        for stores in (*self._uncertain, _Stores(0, tuple(self._stores.values()))):
            for transfer in stores.blocks:
                self.index.discard(transfer.key, transfer.tier_block)
        self.index.unpin_all()
        for state in (self._uncertain, self._stores, self._loads, self._loading):
            state.clear()
        self._num_stored.clear()
        self._num_asked.clear()

    def reset_cache(self) -> None:
        self.forget()
        self.index.clear()

    def _end_load(self, load: kv_transfer.ConnectorLoad, invalid: Collection[BlockId]) -> None:
        for transfer in load.blocks:
            if transfer.block in invalid:
                self.index.discard(transfer.key, transfer.tier_block)
                self.stats.num_invalid_blocks += 1
            else:
                self.stats.num_loaded_blocks += 1
            self.index.unpin(transfer.tier_block)

    def _longest(self, request: Request, begin: int) -> int:
        """The end of the longest run of blocks, from position `begin` on, that the tier has for all
        full-attention layers. At least one token is left to compute.
        """
        hashes = request.block_hashes
        most = min((request.num_tokens - 1) // self._size, len(hashes))
        for position in range(begin, most):
            if any(tier_key(hashes[position], group) not in self.index for group in self._full):
                return position
        return max(begin, most)

    def _has_windows(self, request: Request, begin: int, end: int) -> bool:
        """Whether a request can continue at block position `end`, because the tier has the state
        before the next token, and all blocks from `begin` on in the next token's sliding windows.
        """
        hashes = request.block_hashes
        return all(
            tier_key(hashes[position], group) in self.index
            for group in self._windows
            for position in range(
                max(begin, self._groups[group].first_seen_block(end * self._size)), end
            )
        )

    def _keys(
        self, request: Request, blocks: BlockTables, begin: int, end: int
    ) -> Iterator[tuple[bytes, BlockId]]:
        """The keys and ids of a request's blocks from `begin` to `end`, without null blocks."""
        for group, table in enumerate(blocks):
            for position in range(begin, min(end, len(table))):
                if table[position] != NULL_BLOCK:
                    yield tier_key(request.block_hashes[position], group), table[position]
