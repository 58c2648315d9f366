from stepwell.common.v1 import common_pb2

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.pool.lease import Holder
from services.common.rpc.proto import ProtoEnum, require_same_fields


def holder_from_proto(message: common_pb2.Owner) -> Holder:
    """Converts a message to a holder. The holder's name is empty if the message has no name."""
    return Holder(message.name, message.started_unix_nanos)


require_same_fields(KVCacheGroup, common_pb2.KVCacheGroup.DESCRIPTOR)

_ATTENTION_TYPES = ProtoEnum(AttentionType, common_pb2.AttentionType, "ATTENTION_TYPE_")
_MAMBA_CACHE_MODES = ProtoEnum(MambaCacheMode, common_pb2.MambaCacheMode, "MAMBA_CACHE_MODE_")


def kv_cache_group_from_proto(message: common_pb2.KVCacheGroup) -> KVCacheGroup | None:
    """Converts a message to a group. Returns None if the attention type is unset or unknown."""
    attention_type = _ATTENTION_TYPES.from_proto(message.attention_type)
    if attention_type is None:
        return None
    return KVCacheGroup(
        attention_type,
        message.block_size,
        message.window,
        message.num_layers,
        message.is_eagle_group,
        _MAMBA_CACHE_MODES.from_proto(message.mamba_cache_mode) or MambaCacheMode.NONE,
        message.num_speculative_blocks,
    )


def kv_cache_group_to_proto(group: KVCacheGroup) -> common_pb2.KVCacheGroup:
    mode = common_pb2.MAMBA_CACHE_MODE_UNSPECIFIED
    if group.attention_type is AttentionType.STATE_SPACE:
        mode = _MAMBA_CACHE_MODES.to_proto(group.mamba_cache_mode)
    return common_pb2.KVCacheGroup(
        attention_type=_ATTENTION_TYPES.to_proto(group.attention_type),
        block_size=group.block_size,
        window=group.window,
        num_layers=group.num_layers,
        is_eagle_group=group.is_eagle_group,
        mamba_cache_mode=mode,
        num_speculative_blocks=group.num_speculative_blocks,
    )
