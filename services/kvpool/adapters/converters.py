"""Messages of stepwell.kvpool.v1 to what the core speaks of, and back."""

from collections.abc import Iterable, Sequence
from typing import cast

from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.block_hash import HASH_BYTES, BlockHash
from services.common.kv_cache_groups import AttentionType, GroupSpec
from services.kvpool.core.errors import MalformedTransaction, UnsupportedGroup
from services.kvpool.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from services.kvpool.core.ids import RequestNumber
from services.kvpool.core.kv_pool import PoolConfig
from services.kvpool.core.operations import (
    Admission,
    Admit,
    AdmitResult,
    Commit,
    GroupBlocks,
    Grow,
    GrowResult,
    Lookup,
    LookupResult,
    Operation,
    OperationResult,
    Outcome,
    Release,
    ResetPrefixCache,
    ResetPrefixCacheResult,
    Stop,
    StopReason,
)
from services.kvpool.core.pool_host import HostedPool
from services.kvpool.core.ports import PoolMatch

_ATTENTION_TYPES = {
    common_pb2.ATTENTION_TYPE_FULL: AttentionType.FULL,
    common_pb2.ATTENTION_TYPE_SLIDING_WINDOW: AttentionType.SLIDING_WINDOW,
    common_pb2.ATTENTION_TYPE_CHUNKED_LOCAL: AttentionType.CHUNKED_LOCAL,
    common_pb2.ATTENTION_TYPE_STATE_SPACE: AttentionType.STATE_SPACE,
}

_STOP_REASONS = {
    StopReason.NO_BLOCKS: kvpool_pb2.STOP_REASON_NO_BLOCKS,
    StopReason.HIT_CHANGED: kvpool_pb2.STOP_REASON_HIT_CHANGED,
}


def config_from_wire(request: kvpool_pb2.OpenPoolRequest) -> PoolConfig:
    """The shape of a pool. Raises UnsupportedGroup for a kind of attention that is not known."""
    groups = []
    for index, group in enumerate(request.groups):
        attention_type = _ATTENTION_TYPES.get(group.attention_type)
        if attention_type is None:
            raise UnsupportedGroup(
                "the kind of attention is not said, or not known here",
                field=f"groups[{index}].attention_type",
            )
        groups.append(GroupSpec(attention_type, group.block_size, group.window, group.num_layers))
    return PoolConfig(
        num_blocks=request.num_blocks,
        groups=tuple(groups),
        enable_prefix_caching=request.enable_prefix_caching,
        fingerprint=request.fingerprint,
        drop_last_hit_block=request.drop_last_hit_block,
    )


def operations_from_wire(messages: Iterable[kvpool_pb2.Operation]) -> list[Operation]:
    """The operations of a transaction. Raises MalformedTransaction, naming the field."""
    return [
        _operation_from_wire(message, f"operations[{index}]")
        for index, message in enumerate(messages)
    ]


def split_hashes(packed: bytes, field: str) -> list[BlockHash]:
    """The hashes in concatenated bytes. Raises MalformedTransaction if the last one is cut off."""
    if len(packed) % HASH_BYTES:
        raise MalformedTransaction(
            f"{len(packed)} bytes are no whole number of hashes of {HASH_BYTES} bytes", field=field
        )
    return [
        BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)
    ]


def outcome_to_wire(
    outcome: Outcome, generation: int, sequence: int
) -> kvpool_pb2.TransactResponse:
    """The answer to a transaction."""
    return kvpool_pb2.TransactResponse(
        generation=generation,
        sequence=sequence,
        results=[_result_to_wire(result) for result in outcome.results],
        stop=None if outcome.stop is None else _stop_to_wire(outcome.stop),
        num_free_blocks=outcome.num_free_blocks,
        block_ids_to_zero=outcome.block_ids_to_zero,
    )


def matches_to_wire(matches: Iterable[PoolMatch]) -> kvpool_pb2.MatchPrefixResponse:
    """The depths of a chain."""
    return kvpool_pb2.MatchPrefixResponse(
        matches=[
            kvpool_pb2.PoolMatch(
                pool_id=match.pool_id, generation=match.generation, num_blocks=match.num_blocks
            )
            for match in matches
        ]
    )


def batch_to_wire(batch: EventBatch) -> kvpool_pb2.WatchEventsResponse:
    """A batch of events."""
    return kvpool_pb2.WatchEventsResponse(
        generation=batch.generation,
        sequence=batch.sequence,
        snapshot=batch.snapshot,
        events=[_event_to_wire(event) for event in batch.events],
    )


def stats_to_wire(
    pools: Iterable[HostedPool[kvpool_pb2.TransactResponse]],
) -> kvpool_pb2.GetStatsResponse:
    """What each pool counts."""
    response = kvpool_pb2.GetStatsResponse()
    for hosted in pools:
        stats = hosted.pool.stats()
        response.pools.add(
            pool_id=hosted.pool_id,
            generation=hosted.generation,
            num_usable_blocks=stats.num_usable_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_cached_hashes=stats.num_cached_hashes,
            num_requests=stats.num_requests,
            num_evictions=stats.num_evictions,
            num_query_tokens=stats.num_query_tokens,
            num_hit_tokens=stats.num_hit_tokens,
            num_transactions=stats.num_transactions,
            num_resets=stats.num_resets,
            evicted_lifetime_transactions=stats.evicted_lifetime_transactions,
            evicted_idle_transactions=stats.evicted_idle_transactions,
            num_reuses=stats.num_reuses,
            reuse_gap_transactions=stats.reuse_gap_transactions,
            num_common_prefix_blocks=stats.num_common_prefix_blocks,
        )
    return response


def _operation_from_wire(message: kvpool_pb2.Operation, where: str) -> Operation:
    match message.WhichOneof("operation"):
        case "release":
            return Release(_requests(message.release.requests))
        case "grow":
            grow = message.grow
            return Grow(
                _requests(grow.requests), list(grow.num_computed_tokens), list(grow.num_slots)
            )
        case "commit":
            commit = message.commit
            return Commit(
                _requests(commit.requests),
                list(commit.num_tokens),
                _hashes_by_request(commit.num_new_hashes, commit.new_hashes, f"{where}.commit"),
            )
        case "lookup":
            lookup = message.lookup
            return Lookup(
                _requests(lookup.requests),
                list(lookup.max_hit_tokens),
                _hashes_by_request(lookup.num_new_hashes, lookup.new_hashes, f"{where}.lookup"),
            )
        case "admit":
            return Admit(
                [
                    _admission_from_wire(admission, f"{where}.admit.admissions[{index}]")
                    for index, admission in enumerate(message.admit.admissions)
                ]
            )
        case "reset_prefix_cache":
            return ResetPrefixCache()
        case _:
            raise MalformedTransaction("the operation says nothing to do", field=where)


def _admission_from_wire(message: kvpool_pb2.Admission, where: str) -> Admission:
    return Admission(
        request=RequestNumber(message.request),
        max_hit_tokens=message.max_hit_tokens,
        num_hit_tokens=message.num_hit_tokens,
        num_slots=message.num_slots,
        num_commit_tokens=message.num_commit_tokens,
        num_reserve_slots=message.num_reserve_slots,
        num_watermark_blocks=message.num_watermark_blocks,
        new_hashes=split_hashes(message.new_hashes, f"{where}.new_hashes"),
        resumed=message.resumed,
    )


def _requests(numbers: Iterable[int]) -> list[RequestNumber]:
    return cast(list[RequestNumber], list(numbers))


def _hashes_by_request(
    counts: Sequence[int], packed: bytes, where: str
) -> list[Sequence[BlockHash]]:
    hashes = split_hashes(packed, f"{where}.new_hashes")
    if sum(counts) != len(hashes):
        raise MalformedTransaction(
            f"{len(hashes)} hashes came where {sum(counts)} were counted",
            field=f"{where}.num_new_hashes",
        )
    by_request: list[Sequence[BlockHash]] = []
    start = 0
    for count in counts:
        by_request.append(hashes[start : start + count] if count else ())
        start += count
    return by_request


def _result_to_wire(result: OperationResult | None) -> kvpool_pb2.OperationResult:
    match result:
        case GrowResult(groups):
            return kvpool_pb2.OperationResult(
                grow=kvpool_pb2.GrowResult(groups=map(_blocks_to_wire, groups))
            )
        case LookupResult(num_hit_tokens):
            return kvpool_pb2.OperationResult(
                lookup=kvpool_pb2.LookupResult(num_hit_tokens=num_hit_tokens)
            )
        case AdmitResult(groups):
            return kvpool_pb2.OperationResult(
                admit=kvpool_pb2.AdmitResult(groups=map(_blocks_to_wire, groups))
            )
        case ResetPrefixCacheResult(done):
            return kvpool_pb2.OperationResult(
                reset_prefix_cache=kvpool_pb2.ResetPrefixCacheResult(done=done)
            )
        case None:
            return kvpool_pb2.OperationResult()


def _blocks_to_wire(blocks: GroupBlocks) -> kvpool_pb2.GroupBlocks:
    return kvpool_pb2.GroupBlocks(num_blocks=blocks.num_blocks, block_ids=blocks.block_ids)


def _stop_to_wire(stop: Stop) -> kvpool_pb2.Stop:
    return kvpool_pb2.Stop(
        operation_index=stop.operation_index,
        item_index=stop.item_index,
        reason=_STOP_REASONS[stop.reason],
        num_hit_tokens=stop.num_hit_tokens or 0,
    )


def _event_to_wire(event: Event) -> kvpool_pb2.Event:
    match event:
        case BlocksStored(group, hashes):
            stored = kvpool_pb2.BlocksStored(hashes=b"".join(hashes), group=group)
            return kvpool_pb2.Event(stored=stored)
        case BlocksRemoved(group, hashes):
            removed = kvpool_pb2.BlocksRemoved(hashes=b"".join(hashes), group=group)
            return kvpool_pb2.Event(removed=removed)
        case AllBlocksCleared():
            return kvpool_pb2.Event(cleared=kvpool_pb2.AllBlocksCleared())
