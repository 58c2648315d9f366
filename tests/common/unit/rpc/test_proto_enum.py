"""Each member of Stepwell's enums has the number that the protobuf contracts give it."""

import enum

import pytest
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool.operations import StopReason
from services.common.rpc.proto import ProtoEnum


def test_members_and_numbers_are_converted_both_ways() -> None:
    reasons = ProtoEnum(StopReason, kvpool_pb2.StopReason, "STOP_REASON_")
    for reason in StopReason:
        assert reasons.from_proto(reasons.to_proto(reason)) is reason
    assert reasons.to_proto(StopReason.HIT_CHANGED) == kvpool_pb2.STOP_REASON_HIT_CHANGED
    assert reasons.from_proto(kvpool_pb2.STOP_REASON_UNSPECIFIED) is None
    assert reasons.from_proto(99) is None


@pytest.mark.parametrize("names", ["NO_BLOCKS", "NO_BLOCKS HIT_CHANGED OUT_OF_LUCK"])
def test_a_member_without_its_counterpart_is_refused_at_import(names: str) -> None:
    with pytest.raises(TypeError, match=r"HIT_CHANGED|OUT_OF_LUCK"):
        ProtoEnum(enum.Enum("Reason", names), kvpool_pb2.StopReason, "STOP_REASON_")
