"""The wire form of a queue's state."""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.queue_state import QueueState


def queue_state_from_proto(message: scheduler_pb2.QueueState) -> QueueState:
    """The state that a scheduler announced."""
    return QueueState(
        num_waiting=message.num_waiting,
        max_num_waiting=message.max_num_waiting,
        max_queue_seconds=message.max_queue_seconds,
        seconds_per_request=message.seconds_per_request,
        service_seconds=message.service_seconds,
    )


def queue_state_to_proto(state: QueueState) -> scheduler_pb2.QueueState:
    """The state as a scheduler announces it."""
    return scheduler_pb2.QueueState(
        num_waiting=state.num_waiting,
        max_num_waiting=state.max_num_waiting,
        max_queue_seconds=state.max_queue_seconds,
        seconds_per_request=state.seconds_per_request,
        service_seconds=state.service_seconds,
    )
