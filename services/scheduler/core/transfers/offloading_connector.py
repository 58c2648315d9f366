"""A connector to a tier of the workers' own memory, in which published blocks are kept when the
KV cache no longer has them. Its name is that of vLLM's.

This side decides which blocks are in the tier; the workers copy them. Every full block of a request
is stored once its tokens are known and computed, with the first step that is planned after the one
that computes it: workers copy it before that step writes anything. Blocks of the tier behind a
local hit are loaded between steps. The tier and this index outlive the pool; with new workers both
are empty.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request
from services.scheduler.core.transfers.kv_connector import (
    BlockTransfer,
    ConnectorLoad,
    ExternalMatch,
    KVConnectorMetadata,
    KVTransferResults,
)
from services.scheduler.core.transfers.tier_index import TierBlockId, TierIndex, tier_key


@dataclass(slots=True)
class TierStats:
    """Counts since the start. Tokens are those of admitted requests, as in vLLM's metrics."""

    num_query_tokens: int = 0
    """Tokens behind local hits."""
    num_hit_tokens: int = 0
    """The part of these whose load began."""
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_invalid_blocks: int = 0
    """Blocks that were missing or damaged when they were to be loaded."""


@dataclass(frozen=True, slots=True)
class _Stores:
    """What a step stores: not certain before its output has come."""

    step: int
    blocks: tuple[BlockTransfer, ...]


class OffloadingConnector:
    """See KVConnector. All groups have blocks of one size, which is also that of a hash."""

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
        """Blocks of each request, from its first, that were looked at to be stored."""
        self._num_asked: dict[Request, int] = {}
        """Tokens that the last question of a waiting request was about."""
        self._stores: dict[TierBlockId, BlockTransfer] = {}
        """What the next step stores. A block that is given to another key before is stored once."""
        self._loads: list[ConnectorLoad] = []
        self._uncertain: deque[_Stores] = deque()
        self._loading: dict[RequestKey, ConnectorLoad] = {}

    # See KVConnector

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
                BlockTransfer(block, self.index.pin(key), key)
                for key, block in self._keys(request, blocks, begin, end)
            )
            load = self._loading[request.key] = ConnectorLoad(request.key, transfers)
            self._loads.append(load)

    def blocks_filled(self, request: Request, blocks: BlockTables, num_tokens: int) -> None:
        request.hash_full_blocks(self._fingerprint, self._size)
        begin = self._num_stored.get(request, 0)
        end = min(num_tokens // self._size, len(request.block_hashes))
        if end <= begin:
            return
        self._num_stored[request] = end
        # The first blocks of a sequence are used last, so that it is replaced from its end.
        for key, block in reversed(list(self._keys(request, blocks, begin, end))):
            if key in self.index:
                self.index.touch(key)
            elif (tier_block := self.index.put(key)) is not None:
                self._stores[tier_block] = BlockTransfer(block, tier_block, key)

    def blocks_released(self, request: Request) -> None:
        self._num_stored.pop(request, None)
        self._num_asked.pop(request, None)

    def request_finished(
        self,
        request: Request,  # noqa: ARG002
        blocks: BlockTables,  # noqa: ARG002 - stores are made before blocks get another owner
    ) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def build_connector_meta(self, step: int) -> KVConnectorMetadata | None:
        if not (self._stores or self._loads):
            return None
        stores, loads = tuple(sorted(self._stores.values())), tuple(self._loads)
        self._stores, self._loads = {}, []
        if stores:
            self._uncertain.append(_Stores(step, stores))
        return KVConnectorMetadata(stores, loads)

    def update_connector_output(self, step: int, results: KVTransferResults) -> None:
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

    def _end_load(self, load: ConnectorLoad, invalid: Collection[BlockId]) -> None:
        for transfer in load.blocks:
            if transfer.block in invalid:
                self.index.discard(transfer.key, transfer.tier_block)
                self.stats.num_invalid_blocks += 1
            else:
                self.stats.num_loaded_blocks += 1
            self.index.unpin(transfer.tier_block)

    def _longest(self, request: Request, begin: int) -> int:
        """The end of the blocks behind a local hit that the tier has for full attention. One token
        is left to compute, as behind every hit.
        """
        hashes = request.block_hashes
        most = min((request.num_tokens - 1) // self._size, len(hashes))
        for position in range(begin, most):
            if any(tier_key(hashes[position], group) not in self.index for group in self._full):
                return position
        return max(begin, most)

    def _has_windows(self, request: Request, begin: int, end: int) -> bool:
        """Whether the tier has what a query behind the block `end` sees of the blocks from `begin`
        on, in the groups with windows; and of states the one from which it goes on.
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
        """The blocks of a request in these positions that hold anything, and their keys."""
        for group, table in enumerate(blocks):
            for position in range(begin, min(end, len(table))):
                if table[position] != NULL_BLOCK:
                    yield tier_key(request.block_hashes[position], group), table[position]
