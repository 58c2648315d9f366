"""Adds the tokens of blocks to the changes of the prefix index that the pool reports."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool.block_hash import HASH_BYTES, BlockHash, pack_token_ids
from services.common.pool.ids import RequestKey
from services.common.pool.kv_cache_groups import KVCacheGroup, hit_block_size
from services.common.pool.operations import Admit, Commit, Lookup, Operation, Release
from services.scheduler.adapters.pool.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheNamespace,
    KVCacheEvent,
)
from services.scheduler.adapters.pool.kv_events.log import KVEventLog
from services.scheduler.core.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """A request that is known to the pool, and its number of hashes in Commit operations."""

    request: Request
    num_committed: int = 0


_Sources = dict[BlockHash, tuple[Request, int]]
"""Maps each hash that a transaction may publish to its request and its index in `block_hashes`."""


class KVEventRecorder:
    """Appends the events of each transaction to a log.

    A request is looked up in the queues when an operation first names it, and is stored until its
    release. A request has one hash for each `hash_block_size` tokens. A larger block is identified
    by the last of its hashes. The pool may publish (cache) only the first tokens of a block, under
    an earlier hash of the block. As in vLLM, these tokens are reported as a separate block.
    """

    def __init__(self, log: KVEventLog) -> None:
        self._log = log
        self._waiting: Callable[[], Iterable[Request]] = tuple
        self._known: dict[RequestKey, _Known] = {}
        self._hash_block_size = 1
        self._hashes_per_block: tuple[int, ...] = ()
        self._hashes_per_hit = 1
        """Number of hashes between two positions at which blocks of all KV-cache groups end. With
        groups of different block sizes, the pool may publish blocks after the last such position
        later than the Commit operation that contains their hashes.
        """

    def watch(
        self,
        waiting: Callable[[], Iterable[Request]],
        groups: Sequence[KVCacheGroup],
        hash_block_size: int,
    ) -> None:
        """Sets the pool's KV-cache groups and hash size. `waiting` returns the waiting requests."""
        self._waiting = waiting
        self._hash_block_size = hash_block_size
        self._hashes_per_block = tuple(group.block_size // hash_block_size for group in groups)
        self._hashes_per_hit = hit_block_size(groups) // hash_block_size

    def opened(self) -> None:
        """Records that the pool was opened again and is empty."""
        self._known.clear()
        self._log.append((AllBlocksCleared(),))

    def transacted(
        self, operations: Sequence[Operation], response: kvpool_pb2.TransactResponse
    ) -> None:
        """Records the changes that a transaction made in the prefix index."""
        num_done = response.stop.operation_index if response.HasField("stop") else len(operations)
        sources: _Sources = {}
        for index, operation in enumerate(operations[: num_done + 1]):
            match operation:
                case Release():
                    for key in operation.requests:
                        self._known.pop(key, None)
                case Lookup():
                    self._find(operation.requests)
                case Commit() if index < num_done:
                    for key, num_tokens in zip(
                        operation.requests, operation.num_tokens, strict=True
                    ):
                        self._add_sources(sources, key, num_tokens)
                case Admit():
                    self._find([admission.request for admission in operation.admissions])
                    for admission in operation.admissions:
                        known = self._known.get(admission.request)
                        if known is not None and not admission.holds_blocks:
                            known.num_committed = admission.num_hit_tokens // self._hash_block_size
                        self._add_sources(sources, admission.request, admission.num_commit_tokens)
        if response.events:
            self._log.append(tuple(self._events(response.events, sources)))

    def _find(self, keys: Sequence[RequestKey]) -> None:
        """Finds and stores requests that an operation names for the first time, while they wait."""
        missing = {key for key in keys if key not in self._known}
        if not missing:
            return
        for request in self._waiting():
            if request.key in missing:
                self._known[request.key] = _Known(request)
                missing.discard(request.key)
                if not missing:
                    return

    def _add_sources(self, sources: _Sources, key: RequestKey, num_tokens: int) -> None:
        """Adds the hashes of a request's first `num_tokens` tokens to `sources`."""
        known = self._known.get(key)
        if known is None:
            return
        request, end = known.request, num_tokens // self._hash_block_size
        begin = known.num_committed - known.num_committed % self._hashes_per_hit
        for index in range(begin, min(end, len(request.block_hashes))):
            sources[request.block_hashes[index]] = (request, index)
        known.num_committed = max(known.num_committed, end)

    def _events(
        self, reported: Iterable[kvpool_pb2.Event], sources: Mapping[BlockHash, tuple[Request, int]]
    ) -> Iterator[KVCacheEvent]:
        for event in reported:
            match event.WhichOneof("event"):
                case "stored":
                    yield from self._stored(event.stored, sources)
                case "removed":
                    yield BlockRemoved(_split(event.removed.hashes), event.removed.group)
                case "cleared":
                    yield AllBlocksCleared()

    def _stored(
        self, stored: kvpool_pb2.BlocksStored, sources: Mapping[BlockHash, tuple[Request, int]]
    ) -> Iterator[BlockStored]:
        """Yields one event for each run of consecutive blocks of a request."""
        run: tuple[Request, int, int] | None = None
        num_hashes = self._hashes_per_block[stored.group]
        for block_hash in _split(stored.hashes):
            source = sources.get(block_hash) or self._search(block_hash)
            if source is None:
                logger.error(
                    "no KV event is published for a stored block, because its tokens are not known"
                )
                continue
            request, end = source[0], source[1] + 1
            is_whole = end % num_hashes == 0
            begin = end - num_hashes if is_whole else end - 1
            if is_whole and run is not None and run[0] is request and run[2] == begin:
                run = (request, run[1], end)
                continue
            if run is not None:
                yield self._run(*run, stored.group)
            run = (request, begin, end)
        if run is not None:
            yield self._run(*run, stored.group)

    def _run(self, request: Request, begin: int, end: int, group: int) -> BlockStored:
        """The event for a group's blocks that have the request's hashes from `begin` to `end`."""
        size = self._hash_block_size
        num_hashes = min(self._hashes_per_block[group], end - begin)
        return BlockStored(
            block_hashes=tuple(request.block_hashes[begin + num_hashes - 1 : end : num_hashes]),
            parent_block_hash=request.block_hashes[begin - 1] if begin else None,
            token_ids=pack_token_ids(request.token_ids[begin * size : end * size]),
            group_idx=group,
            namespace=CacheNamespace(
                request.cache_salt, request.adapter_name, request.adapter_digest
            ),
        )

    def _search(self, block_hash: BlockHash) -> tuple[Request, int] | None:
        """The request and index of a hash that is published again, as after a failed load."""
        for known in self._known.values():
            if block_hash in known.request.block_hashes:
                return known.request, known.request.block_hashes.index(block_hash)
        return None


def _split(hashes: bytes) -> tuple[BlockHash, ...]:
    return tuple(
        BlockHash(hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)
    )
