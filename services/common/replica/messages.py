"""Converts the state of a replica's queue from and to its message."""

from dataclasses import asdict, fields

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.replica.load import ReplicaLoad
from services.common.replica.pause_mode import PauseMode
from services.common.replica.queue_state import QueueState
from services.common.rpc.proto import ProtoEnum, require_same_fields

_MODES = ProtoEnum(PauseMode, scheduler_pb2.PauseMode, "PAUSE_MODE_")

pause_mode_to_proto = _MODES.to_proto
pause_mode_from_proto = _MODES.from_proto


def replica_load_from_proto(message: scheduler_pb2.ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        num_requests=message.num_requests,
        num_uncomputed_tokens=message.num_uncomputed_tokens,
        seconds_per_prompt_token=message.seconds_per_prompt_token,
        seconds_per_decode=message.seconds_per_decode,
        num_other_requests=message.num_other_requests,
    )


def replica_load_to_proto(load: ReplicaLoad) -> scheduler_pb2.ReplicaLoad:
    return scheduler_pb2.ReplicaLoad(
        num_requests=load.num_requests,
        num_uncomputed_tokens=load.num_uncomputed_tokens,
        seconds_per_prompt_token=load.seconds_per_prompt_token,
        seconds_per_decode=load.seconds_per_decode,
        num_other_requests=load.num_other_requests,
    )


require_same_fields(QueueState, scheduler_pb2.QueueState.DESCRIPTOR)


def queue_state_from_proto(message: scheduler_pb2.QueueState) -> QueueState:
    return QueueState(**{field.name: getattr(message, field.name) for field in fields(QueueState)})


def queue_state_to_proto(state: QueueState) -> scheduler_pb2.QueueState:
    return scheduler_pb2.QueueState(**asdict(state))
