from stepwell.common.v1 import common_pb2

from services.common.pool.lease import Holder


def holder_from_proto(message: common_pb2.Owner) -> Holder:
    """Converts a message to a holder. Its name is empty if the message has no name."""
    return Holder(message.name, message.started_unix_nanos)
