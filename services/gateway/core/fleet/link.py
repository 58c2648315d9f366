"""The interfaces that a Replica uses: the connection to its scheduler, and its listener."""

from typing import TYPE_CHECKING, Protocol

from services.common.errors import StepwellError
from services.gateway.core.fleet.sequence_trace import ResubmitCause
from services.gateway.core.request.inflight import Inflight

if TYPE_CHECKING:
    from services.gateway.core.fleet.replica import Replica


class Link(Protocol):
    """The connection to one scheduler, which passes received results to methods of the Replica."""

    def add(self, handle: int, inflight: Inflight) -> None:
        """Queues a sequence, with its generated tokens, to be sent in the order of the calls. It is
        not sent if the session with the scheduler ends before. `handle` identifies the sequence in
        later calls.
        """

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        """Sends the next turn of a client's session (a request that continues an earlier request).
        The scheduler has kept the earlier request's sequence under `handle`. Only the tokens of
        `inflight` after the first `num_tokens` are sent.
        """

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:
        """Ends a sequence at the scheduler. The replica receives no more results of the sequence.
        `was_stopped` is true if a stop string ended the sequence.
        """

    def end_turn(self, handle: int, tool: str) -> None:
        """Tells the scheduler which tool the client runs after the ended sequence."""


class ReplicaListener(Protocol):
    """The methods of the fleet by which a replica reports its events."""

    def replica_changed(self, replica: "Replica") -> None:
        """A session with the scheduler was opened, or the replica became able or unable to run
        steps.
        """

    def replica_lost(self, inflights: list[Inflight], cause: ResubmitCause) -> None:
        """The session with the scheduler ended for `cause`. The replica had these sequences."""

    def request_rejected(
        self, inflight: Inflight, error: StepwellError, replica: "Replica"
    ) -> None:
        """The scheduler refused a sequence."""

    def sequence_started(self, inflight: Inflight) -> None:
        """A sequence was scheduled at the replica for the first time."""

    def sequence_left(self, inflight: Inflight) -> None:
        """A sequence ended at the replica, or was aborted, refused or lost."""

    def load_reported(self, replica: "Replica") -> None:
        """The replica's scheduler reported its queue or its load."""
