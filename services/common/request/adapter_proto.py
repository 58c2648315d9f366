"""The wire form of adapters."""

from stepwell.common.v1 import common_pb2

from services.common.request.adapter import Adapter


def adapter_to_proto(adapter: Adapter | None) -> common_pb2.Adapter | None:
    """The message; None for none."""
    if adapter is None:
        return None
    return common_pb2.Adapter(digest=adapter.digest, name=adapter.name, path=adapter.path)


def adapter_from_proto(message: common_pb2.Adapter) -> Adapter:
    """The adapter of a message."""
    return Adapter(message.digest, message.name, message.path)
