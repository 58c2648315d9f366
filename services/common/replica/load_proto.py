"""Converts a replica's load from and to its message."""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.replica.load import ReplicaLoad


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
