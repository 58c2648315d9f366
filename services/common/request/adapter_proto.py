"""Converts adapters from and to their message."""

from stepwell.common.v1 import common_pb2

from services.common.request.adapter import Adapter


def adapter_to_proto(adapter: Adapter | None) -> common_pb2.Adapter | None:
    if adapter is None:
        return None
    return common_pb2.Adapter(digest=adapter.digest, name=adapter.name, path=adapter.path)


def adapter_from_proto(message: common_pb2.Adapter) -> Adapter:
    return Adapter(message.digest, message.name, message.path)
