"""Serves the KVPool contract for the pools of this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeVar

from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.errors import InvalidArgument
from services.common.pool.ids import PoolId
from services.common.pool.lease import Holder, Lease
from services.common.pool.messages import holder_from_proto
from services.common.pool.operations_proto import (
    block_hashes_from_proto,
    operations_from_proto,
    outcome_to_proto,
)
from services.common.rpc.protocol import own_release, require_same_protocol
from services.common.rpc.server import Context
from services.common.telemetry.tracing import Tracing
from services.kvpool.adapters import converters
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.telemetry import traced
from services.kvpool.core.block_map import block_map
from services.kvpool.core.errors import TakenOver
from services.kvpool.core.pool_host import HostedPool, PoolHost
from services.kvpool.core.ports import Directory

Message = TypeVar("Message")


class TransactStream:
    """One client's stream of transactions, which a newer stream may end at any time. The stream
    belongs to the task that created it. `take_over` cancels this task if it is waiting for the
    client. If the task is applying a transaction, the stream ends at its next read.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._is_reading = False
        self._is_taken_over = False

    async def read(self, messages: AsyncIterator[Message]) -> Message | None:
        """Returns the client's next message. None at the end. Raises TakenOver."""
        message = None
        if not self._is_taken_over:
            message = await self._read_interruptibly(messages)
        if self._is_taken_over:
            raise TakenOver(
                "the stream of transactions ends: a newer stream of the pool has replaced it"
            )
        return message

    def take_over(self) -> None:
        """Ends this stream, because a newer stream replaces it."""
        self._is_taken_over = True
        if self._is_reading and self._task is not None:
            self._task.cancel()

    async def _read_interruptibly(self, messages: AsyncIterator[Message]) -> Message | None:
        self._is_reading = True
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            # Without take_over(), the client has disconnected, which the server handles.
            if not self._is_taken_over or self._task is None:
                raise
            self._task.uncancel()
            return None
        finally:
            self._is_reading = False


class PoolStreams:
    def __init__(self) -> None:
        self._streams: dict[PoolId, TransactStream] = {}

    def assign(self, pool_id: PoolId, stream: TransactStream) -> None:
        """Makes `stream` the current stream of a pool and ends the previous one."""
        before = self._streams.get(pool_id)
        if before is stream:
            return
        self._streams[pool_id] = stream
        if before is not None:
            before.take_over()

    def leave(self, stream: TransactStream) -> None:
        for pool_id in [pool for pool, present in self._streams.items() if present is stream]:
            del self._streams[pool_id]


LEASE_GRACE_SECONDS = 2.0
"""Time after the opening of a pool, or after the end of its stream of transactions, in which the
pool's scheduler must open a stream. Otherwise another scheduler may take over the pool.
"""
MAX_CELLS = 65_536
"""Limit on the number of cells in a block map. GetBlocks rejects larger values."""

Host = PoolHost[kvpool_pb2.TransactResponse]


class KVPoolServicer(kvpool_pb2_grpc.KVPoolServicer):
    """Converts messages to calls of the core, and results to messages."""

    def __init__(self, host: Host, directory: Directory, feed: EventFeed, tracing: Tracing) -> None:
        self._host = host
        self._leases: dict[PoolId, tuple[Lease, Holder]] = {}
        self._directory = directory
        self._feed = feed
        self._streams = PoolStreams()
        self._apply = traced(self._transact, tracing)

    async def OpenPool(
        self, request: kvpool_pb2.OpenPoolRequest, _context: Context
    ) -> kvpool_pb2.OpenPoolResponse:
        require_same_protocol("the scheduler", request.release, "kvpool")
        pool_id, holder = PoolId(request.pool_id), holder_from_proto(request.owner)
        config = converters.pool_config_from_proto(request)
        lease, _ = self._leases.get(pool_id) or (
            Lease(f"pool {pool_id!r}", LEASE_GRACE_SECONDS, time.monotonic),
            holder,
        )
        lease.take(holder)
        try:
            hosted = self._host.open(
                pool_id, config, request.seen_generation, reports_events=request.report_events
            )
            self._leases[pool_id] = lease, holder
        finally:
            lease.release(holder)
        return kvpool_pb2.OpenPoolResponse(generation=hosted.generation, release=own_release())

    async def Transact(
        self, request_iterator: AsyncIterator[kvpool_pb2.TransactRequest], _context: Context
    ) -> AsyncIterator[kvpool_pb2.TransactResponse]:
        """Answers each transaction once, in order."""
        stream = TransactStream()
        leases: dict[int, tuple[Lease, Holder]] = {}
        try:
            while (request := await stream.read(request_iterator)) is not None:
                hosted = self._host.get(PoolId(request.pool_id))
                answer = hosted.ledger.find(request.generation, request.sequence)
                self._streams.assign(hosted.pool_id, stream)
                if hosted.generation not in leases:
                    lease, holder = leases[hosted.generation] = self._leases[hosted.pool_id]
                    lease.take(holder)
                yield self._apply(hosted, request) if answer is None else answer
        finally:
            self._streams.leave(stream)
            for lease, holder in leases.values():
                lease.release(holder)

    async def MatchPrefix(
        self, request: kvpool_pb2.MatchPrefixRequest, _context: Context
    ) -> kvpool_pb2.MatchPrefixResponse:
        """Returns how many leading blocks of a chain of hashes are cached in each pool. Tests and
        tools use it. Gateways use WatchEvents or the directory in Redis instead.
        """
        hashes = block_hashes_from_proto(request.hashes, "hashes")
        return converters.pool_matches_to_proto(await self._directory.match(hashes))

    async def WatchEvents(
        self, request: kvpool_pb2.WatchEventsRequest, _context: Context
    ) -> AsyncIterator[kvpool_pb2.WatchEventsResponse]:
        """Streams a snapshot of a pool's index, then its changes, for gateways without Redis. Each
        transaction publishes its changes before it is answered. Events therefore never wait for
        other events or for a timer.
        """
        pool_id = self._host.get(PoolId(request.pool_id)).pool_id
        watching = self._feed.watch(pool_id, lambda: self._host.get(pool_id).snapshot())
        async with aclosing(watching) as batches:
            async for batch in batches:
                groups = self._host.get(pool_id).pool.config.groups
                yield converters.event_batch_to_proto(batch, groups)

    async def GetStats(
        self, request: kvpool_pb2.GetStatsRequest, _context: Context
    ) -> kvpool_pb2.GetStatsResponse:
        pools = [self._host.get(PoolId(request.pool_id))] if request.pool_id else self._host.pools()
        return converters.pool_stats_to_proto(pools)

    async def GetBlocks(
        self, request: kvpool_pb2.GetBlocksRequest, _context: Context
    ) -> kvpool_pb2.GetBlocksResponse:
        hosted = self._host.get(PoolId(request.pool_id))
        if not 1 <= request.max_cells <= MAX_CELLS:
            raise InvalidArgument(f"max_cells must be 1 to {MAX_CELLS}", field="max_cells")
        # In a thread, because the map of a large pool would delay transactions.
        blocks = await asyncio.to_thread(block_map, hosted.pool.block_use(), request.max_cells)
        return kvpool_pb2.GetBlocksResponse(
            generation=hosted.generation, blocks=converters.block_map_to_proto(blocks)
        )

    def _transact(
        self, hosted: HostedPool[kvpool_pb2.TransactResponse], request: kvpool_pb2.TransactRequest
    ) -> kvpool_pb2.TransactResponse:
        outcome = hosted.pool.transact(operations_from_proto(request.operations))
        answer = outcome_to_proto(outcome, hosted.generation, request.sequence)
        events = self._host.publish_events(hosted)
        if hosted.reports_events:
            answer.events.extend(map(converters.event_to_proto, events))
        hosted.ledger.record(request.sequence, answer)
        return answer
