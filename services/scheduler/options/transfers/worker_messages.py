"""The parts of messages to and from workers that concern the tier (host memory for KV blocks)."""

from collections.abc import Iterable

from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import pack_token_ids, unpack_token_ids
from services.common.pool.ids import BlockId, RequestKey
from services.scheduler.core.kv_transfer import (
    NO_RESULTS,
    BlockTransfer,
    KVConnectorMetadata,
    KVTransferResults,
)
from services.scheduler.options.transfer_option import TransferMessages


class TierLoads(TransferMessages):
    """Adds stores (copies to the tier) and loads (from the tier) to the messages to the workers,
    and collects the ends of loads. A load has ended when every rank has reported its end. A block
    is invalid (not loaded) if any rank reports it as invalid.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._blocks: dict[int, frozenset[int]] = {}
        """Maps each request with a load in progress to the KV blocks of the load."""
        self._reported: dict[int, set[str]] = {}
        """Maps each request with a load in progress to the ranks that have reported its end."""
        self._invalid: dict[int, set[int]] = {}
        self._ended: list[int] = []

    def add(self, request: worker_pb2.ExecuteRequest, metadata: KVConnectorMetadata) -> None:
        if metadata.stores:
            request.tier_stores.CopyFrom(_tier_blocks(metadata.stores))
        request.tier_loads.extend(
            worker_pb2.TierLoad(request=load.request, blocks=_tier_blocks(load.blocks))
            for load in metadata.loads
        )

    def begin(self, metadata: KVConnectorMetadata) -> None:
        for load in metadata.loads:
            self._blocks[load.request] = frozenset(one.block for one in load.blocks)

    def note(self, rank: str, response: worker_pb2.ExecuteResponse) -> None:
        for load in response.ended_tier_loads:
            request, blocks = load.request, self._blocks.get(load.request)
            reported = self._reported.setdefault(request, set())
            if blocks is None or rank in reported:
                raise ValueError(
                    f"ended_tier_loads: the worker ends a load of request {request}, which it has "
                    "not started or has already ended"
                )
            found = unpack_token_ids(load.invalid_block_ids)
            if not blocks.issuperset(found):
                raise ValueError(
                    "ended_tier_loads.invalid_block_ids: has blocks that are not in the load"
                )
            reported.add(rank)
            self._invalid.setdefault(request, set()).update(found)
            if len(reported) == self._num_ranks:
                del self._reported[request], self._blocks[request]
                self._ended.append(request)

    def take(self) -> KVTransferResults:
        if not self._ended:
            return NO_RESULTS
        ended, self._ended = self._ended, []
        invalid = sorted(block for request in ended for block in self._invalid.pop(request))
        return KVTransferResults(
            finished_recving=list(map(RequestKey, ended)),
            invalid_block_ids=list(map(BlockId, invalid)),
        )

    def forget(self) -> None:
        self._blocks.clear()
        self._reported.clear()
        self._invalid.clear()
        self._ended.clear()


def _tier_blocks(transfers: Iterable[BlockTransfer]) -> worker_pb2.TierBlocks:
    blocks = tuple(transfers)
    return worker_pb2.TierBlocks(
        block_ids=pack_token_ids([transfer.block for transfer in blocks]),
        tier_block_ids=pack_token_ids([transfer.tier_block for transfer in blocks]),
        keys=b"".join(transfer.key for transfer in blocks),
    )
