"""Converts messages of stepwell.kvpool.v1, except transactions (`services.common.pool`)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Literal

from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.kv_directory import node_name
from services.common.pool.messages import kv_cache_group_from_proto, kv_cache_group_to_proto
from services.common.rpc.proto import ProtoEnum
from services.kvpool.core import events
from services.kvpool.core.block_map import BlockMap, BlockState
from services.kvpool.core.errors import UnsupportedGroup
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.pool_host import HostedPool
from services.kvpool.core.ports import PoolMatch

_OPTIONAL: tuple[
    Literal[
        "prefix_match_unit",
        "prefix_cache_retention_interval",
        "max_model_len",
        "max_in_flight_tokens",
    ],
    ...,
] = (
    "prefix_match_unit",
    "prefix_cache_retention_interval",
    "max_model_len",
    "max_in_flight_tokens",
)


def pool_config_from_proto(request: kvpool_pb2.OpenPoolRequest) -> PoolConfig:
    """Converts a pool's configuration. Raises UnsupportedGroup for an unknown attention type."""
    groups = []
    for index, message in enumerate(request.groups):
        group = kv_cache_group_from_proto(message)
        if group is None:
            raise UnsupportedGroup(
                "attention_type is not set, or this kvpool does not know its value",
                field=f"groups[{index}].attention_type",
            )
        groups.append(group)
    return PoolConfig(
        num_blocks=request.num_blocks,
        groups=tuple(groups),
        enable_prefix_caching=request.enable_prefix_caching,
        fingerprint=request.fingerprint,
        drop_last_hit_block=request.drop_last_hit_block,
        node=node_name(request.owner.name or request.pool_id, request.owner.started_unix_nanos),
        **{name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)},
    )


def pool_matches_to_proto(matches: Iterable[PoolMatch]) -> kvpool_pb2.MatchPrefixResponse:
    """Converts the result of MatchPrefix: the number of cached blocks in each pool."""
    return kvpool_pb2.MatchPrefixResponse(
        matches=[kvpool_pb2.PoolMatch(**asdict(match)) for match in matches]
    )


def event_batch_to_proto(
    batch: events.EventBatch, groups: Sequence[KVCacheGroup]
) -> kvpool_pb2.WatchEventsResponse:
    """Converts a batch of events. A snapshot includes the groups of its pool."""
    return kvpool_pb2.WatchEventsResponse(
        generation=batch.generation,
        sequence=batch.sequence,
        snapshot=batch.snapshot,
        events=[event_to_proto(event) for event in batch.events],
        groups=map(kv_cache_group_to_proto, groups) if batch.snapshot else (),
    )


def pool_stats_to_proto(
    pools: Iterable[HostedPool[kvpool_pb2.TransactResponse]],
) -> kvpool_pb2.GetStatsResponse:
    return kvpool_pb2.GetStatsResponse(
        pools=[
            kvpool_pb2.PoolStats(
                pool_id=hosted.pool_id, generation=hosted.generation, **asdict(hosted.pool.stats())
            )
            for hosted in pools
        ]
    )


def event_to_proto(event: events.Event) -> kvpool_pb2.Event:
    match event:
        case events.BlocksStored(group, hashes):
            stored = kvpool_pb2.BlocksStored(hashes=b"".join(hashes), group=group)
            return kvpool_pb2.Event(stored=stored)
        case events.BlocksRemoved(group, hashes):
            removed = kvpool_pb2.BlocksRemoved(hashes=b"".join(hashes), group=group)
            return kvpool_pb2.Event(removed=removed)
        case events.AllBlocksCleared():
            return kvpool_pb2.Event(cleared=kvpool_pb2.AllBlocksCleared())


_BLOCK_STATES = ProtoEnum(BlockState, common_pb2.BlockState, "BLOCK_STATE_")


def block_map_to_proto(blocks: BlockMap) -> common_pb2.BlockMap:
    return common_pb2.BlockMap(
        blocks_per_cell=blocks.blocks_per_cell,
        states=map(_BLOCK_STATES.to_proto, blocks.states),
        owners=blocks.owners,
        num_blank=blocks.num_blank,
        num_cached=blocks.num_cached,
        num_held=blocks.num_held,
        num_shared=blocks.num_shared,
        num_retained=blocks.num_retained,
    )
