from stepwell.common.v1 import common_pb2

from services.common.request.structured_outputs import (
    StructuredOutputs,
    StructuredOutputsKind,
    invalid,
)
from services.common.rpc.proto_enum import ProtoEnum
from services.common.rpc.proto_fields import require_same_fields

require_same_fields(StructuredOutputs, common_pb2.StructuredOutputs.DESCRIPTOR)
_KINDS = ProtoEnum(
    StructuredOutputsKind, common_pb2.StructuredOutputsKind, "STRUCTURED_OUTPUTS_KIND_"
)


def structured_outputs_from_proto(message: common_pb2.StructuredOutputs) -> StructuredOutputs:
    """Converts a message, without validation. Raises InvalidArgument for an unknown kind."""
    kind = _KINDS.from_proto(message.kind)
    if kind is None:
        raise invalid("kind is not set, or not known here")
    return StructuredOutputs(kind, message.text)


def structured_outputs_to_proto(wanted: StructuredOutputs) -> common_pb2.StructuredOutputs:
    return common_pb2.StructuredOutputs(kind=_KINDS.to_proto(wanted.kind), text=wanted.text)
