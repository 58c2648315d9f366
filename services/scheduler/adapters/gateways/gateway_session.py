"""A gateway's session: its gRPC stream, and the requests that have arrived on it."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InvalidArgument, StepwellError
from services.common.pool.ids import ContextId
from services.common.recent import Recent
from services.common.replica.load import ReplicaLoad
from services.common.replica.queue_state import QueueState
from services.common.rpc.status import status_code
from services.scheduler.adapters.gateways.outbox import Outbox
from services.scheduler.core.request import Request

_MAX_CONTEXTS = 4096
"""Limit on the size of `GatewaySession.contexts`. A context is the KV blocks that an ended request
left in the pool, for the next request of the same agent.
"""


@runtime_checkable
class StreamWriter(Protocol):
    """The server side of a `LocalStream`, on which a gateway on this machine bypasses gRPC."""

    @property
    def can_write(self) -> bool:
        """Whether a message can be sent at once, before the gateway has read earlier messages."""

    def write_now(self, response: scheduler_pb2.SessionResponse) -> None:
        """Sends a message, or stores it until the gateway has read earlier messages."""


@dataclass(slots=True, eq=False)
class GatewaySession:
    gateway_id: str
    outbox: Outbox = field(default_factory=Outbox)
    writer: StreamWriter | None = None
    """Writes messages without waking the task that runs the session. Only set for local streams,
    after the first messages of the session were written.
    """
    requests: dict[int, Request] = field(default_factory=dict)
    """Maps handles (numbers that the gateway chose) to unfinished requests."""
    contexts: Recent[int, ContextId] = field(default_factory=lambda: Recent(_MAX_CONTEXTS))
    """Maps the handles of recently ended requests to their contexts."""
    queue_announced: QueueState | None = None
    """The queue state (length, expected waits) that was last sent to the gateway, or None."""
    load_announced: ReplicaLoad = field(default_factory=lambda: ReplicaLoad(0, 0))
    taken_number: int = 0
    """Number of the last message that was received."""
    num_taken_requests: int = 0
    """Number of new requests in all received messages."""
    _num_sent: int = 0

    def take(self, message: scheduler_pb2.SessionRequest) -> None:
        """Records a received message. Raises InvalidArgument if its number is not the next."""
        if message.number != self.taken_number + 1:
            raise InvalidArgument(
                f"received message {message.number} of the session, but expected message "
                f"{self.taken_number + 1}",
                field="number",
            )
        self.taken_number = message.number
        self.num_taken_requests += message.HasField("add") or len(message.adds.requests)

    def note_context(self, handle: int, context: ContextId | None) -> None:
        """Stores an ended request's context, for a message that names the agent's next tool."""
        if context is not None:
            self.contexts[handle] = context

    def numbered(self, response: scheduler_pb2.SessionResponse) -> scheduler_pb2.SessionResponse:
        """Numbers the next message to send, and acknowledges the received messages in it."""
        self._num_sent += 1
        response.number = self._num_sent
        response.taken_number = self.taken_number
        response.num_taken_requests = self.num_taken_requests
        return response

    def flush(self) -> None:
        """Sends the collected deltas (new tokens, ends) at once, if they end no request and no
        other message must be sent first. Otherwise wakes the session's task, which sends them.
        """
        if self.writer is not None and self.outbox.may_be_taken_at_once and self.writer.can_write:
            self.writer.write_now(self.numbered(self.outbox.take_response()))
        else:
            self.outbox.flush()

    def reject(self, handle: int, error: StepwellError) -> None:
        self.outbox.rejected(
            scheduler_pb2.Rejection(
                handle=handle,
                code=status_code(error).value[0],
                reason=error.error_reason,
                field=error.field or "",
                message=error.message,
                retry_after_millis=round(1000 * (error.retry_after_seconds or 0)),
            )
        )
