"""Converts finish reasons from and to their numbers in stepwell.common.v1."""

from stepwell.common.v1 import common_pb2

from services.common.request.finish_reason import FinishReason
from services.common.rpc.proto_enum import ProtoEnum

_FINISH_REASONS = ProtoEnum(FinishReason, common_pb2.FinishReason, "FINISH_REASON_")

finish_reason_to_proto = _FINISH_REASONS.to_proto
finish_reason_from_proto = _FINISH_REASONS.from_proto
