"""The methods of the services, by their names on the wire."""

import enum
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from stepwell.common.v1 import metrics_pb2
from stepwell.kvpool.v1 import kvpool_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

_FILES = (scheduler_pb2, kvpool_pb2, worker_pb2, metrics_pb2)


class Direction(enum.Enum):
    """Which side sends a message."""

    REQUEST = "request"
    RESPONSE = "response"


@dataclass(frozen=True, slots=True)
class Lane:
    """The messages of one gRPC method in one direction."""

    method: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.method.rpartition('/')[2]} {self.direction.value}"


def _services() -> list[ServiceDescriptor]:
    return [one for file in _FILES for one in file.DESCRIPTOR.services_by_name.values()]


METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for service in _services()
    for method in service.methods
}


def streams_both_ways(method: str) -> bool:
    """Whether both sides of a method stream messages. This is False for methods of other APIs."""
    known = METHODS.get(method)
    return known is not None and known.client_streaming and known.server_streaming


def message_type(lane: Lane) -> Descriptor | None:
    """The protobuf type of a lane's messages. None for other APIs, such as the health check."""
    method = METHODS.get(lane.method)
    if method is None:
        return None
    return method.input_type if lane.direction is Direction.REQUEST else method.output_type


def decoded(lane: Lane, data: bytes) -> Message | None:
    """Parses a message of a lane. Returns None for methods of other APIs."""
    type_of = message_type(lane)
    return None if type_of is None else GetMessageClass(type_of).FromString(data)
