"""The interface through which a Replica uses the connection to its scheduler."""

from typing import Protocol

from services.gateway.core.request.inflight import Inflight


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
