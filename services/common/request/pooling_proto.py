from stepwell.common.v1 import common_pb2

from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.common.rpc.proto_enum import ProtoEnum
from services.common.rpc.proto_fields import require_same_fields

require_same_fields(PoolingParams, common_pb2.PoolingParams.DESCRIPTOR)
require_same_fields(Pooler, common_pb2.Pooler.DESCRIPTOR)

_TASKS = ProtoEnum(PoolingTask, common_pb2.PoolingTask, "POOLING_TASK_")
_TYPES = ProtoEnum(PoolingType, common_pb2.PoolingType, "POOLING_TYPE_")


def pooling_from_proto(message: common_pb2.PoolingParams) -> PoolingParams:
    return PoolingParams(
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else None,
        num_first_text_tokens=message.num_first_text_tokens,
    )


def pooling_to_proto(params: PoolingParams | None) -> common_pb2.PoolingParams | None:
    if params is None:
        return None
    return common_pb2.PoolingParams(
        dimensions=params.dimensions,
        use_activation=params.use_activation,
        num_first_text_tokens=params.num_first_text_tokens,
    )


def pooler_from_proto(message: common_pb2.Pooler) -> Pooler | None:
    """Converts a message to a pooler. Returns None if a type is unset or unknown."""
    task, kind = _TASKS.from_proto(message.task), _TYPES.from_proto(message.pooling_type)
    if task is None or kind is None:
        return None
    return Pooler(
        task,
        kind,
        message.size,
        may_shorten=message.may_shorten,
        matryoshka_dimensions=tuple(message.matryoshka_dimensions),
        takes_whole_prompts=message.takes_whole_prompts,
    )


def pooler_to_proto(pooler: Pooler | None) -> common_pb2.Pooler | None:
    if pooler is None:
        return None
    return common_pb2.Pooler(
        task=_TASKS.to_proto(pooler.task),
        pooling_type=_TYPES.to_proto(pooler.pooling_type),
        size=pooler.size,
        may_shorten=pooler.may_shorten,
        matryoshka_dimensions=pooler.matryoshka_dimensions,
        takes_whole_prompts=pooler.takes_whole_prompts,
    )
