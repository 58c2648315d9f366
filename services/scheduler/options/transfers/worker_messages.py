"""Tracks loads from the workers' tier (their memory for offloaded blocks). A load has ended when
every rank has reported its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import pack_token_ids, unpack_token_ids
from services.common.pool.ids import BlockId, RequestKey
from services.scheduler.options.transfers.core.kv_connector import (
    NO_RESULTS,
    BlockTransfer,
    KVConnectorMetadata,
    KVTransferResults,
)


def add_tier_fields(request: worker_pb2.ExecuteRequest, metadata: KVConnectorMetadata) -> None:
    """Adds the stores and loads of a step to its message."""
    if metadata.stores:
        request.tier_stores.CopyFrom(_tier_blocks(metadata.stores))
    request.tier_loads.extend(
        worker_pb2.TierLoad(request=load.request, blocks=_tier_blocks(load.blocks))
        for load in metadata.loads
    )


def _tier_blocks(transfers: Iterable[BlockTransfer]) -> worker_pb2.TierBlocks:
    blocks = tuple(transfers)
    return worker_pb2.TierBlocks(
        block_ids=pack_token_ids([transfer.block for transfer in blocks]),
        tier_block_ids=pack_token_ids([transfer.tier_block for transfer in blocks]),
        keys=b"".join(transfer.key for transfer in blocks),
    )


@dataclass(slots=True)
class EndedLoads:
    """Collects reports of ended loads. A block is invalid if any rank reports it as invalid."""

    num_ranks: int
    _blocks: dict[int, frozenset[int]] = field(default_factory=dict)
    """Maps the request of each load in progress to the blocks of the load."""
    _reported: dict[int, set[str]] = field(default_factory=dict)
    """Maps the request of each load in progress to the ranks that have reported its end."""
    _invalid: dict[int, set[int]] = field(default_factory=dict)
    _ended: list[int] = field(default_factory=list)

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Records the loads that begin with a step."""
        for load in metadata.loads:
            self._blocks[load.request] = frozenset(one.block for one in load.blocks)

    def note(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:
        """Records the ended loads in a rank's answer. Raises ValueError for any other load."""
        for load in response.ended_tier_loads:
            request, blocks = load.request, self._blocks.get(load.request)
            reported = self._reported.setdefault(request, set())
            if blocks is None or rank in reported:
                raise ValueError(f"ended_tier_loads: no load of request {request} is under way")
            found = unpack_token_ids(load.invalid_block_ids)
            if not blocks.issuperset(found):
                raise ValueError("ended_tier_loads.invalid_block_ids: blocks of no load")
            reported.add(rank)
            self._invalid.setdefault(request, set()).update(found)
            if len(reported) == self.num_ranks:
                del self._reported[request], self._blocks[request]
                self._ended.append(request)

    def take(self) -> KVTransferResults:
        """Returns the loads that ended since the last call."""
        if not self._ended:
            return NO_RESULTS
        ended, self._ended = self._ended, []
        invalid = sorted(block for request in ended for block in self._invalid.pop(request))
        return KVTransferResults(
            finished_recving=list(map(RequestKey, ended)),
            invalid_block_ids=list(map(BlockId, invalid)),
        )

    def forget(self) -> None:
        """Removes all loads, because pool and workers are opened again."""
        self._blocks.clear()
        self._reported.clear()
        self._invalid.clear()
        self._ended.clear()
