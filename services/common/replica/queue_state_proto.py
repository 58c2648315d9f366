"""Converts a queue's state from and to its message."""

from dataclasses import asdict, fields

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.replica.queue_state import QueueState
from services.common.rpc.proto_fields import require_same_fields

require_same_fields(QueueState, scheduler_pb2.QueueState.DESCRIPTOR)


def queue_state_from_proto(message: scheduler_pb2.QueueState) -> QueueState:
    return QueueState(**{field.name: getattr(message, field.name) for field in fields(QueueState)})


def queue_state_to_proto(state: QueueState) -> scheduler_pb2.QueueState:
    return scheduler_pb2.QueueState(**asdict(state))
