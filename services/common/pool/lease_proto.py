"""Holders of leases from their message."""

from stepwell.common.v1 import common_pb2

from services.common.pool.lease import Holder


def holder_from_proto(message: common_pb2.Owner) -> Holder:
    """The process that a message names; its name is empty if the message has none."""
    return Holder(message.name, message.started_unix_nanos)
