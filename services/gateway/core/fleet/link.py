"""The interface of a connection to a scheduler."""

from typing import Protocol

from services.gateway.core.request.inflight import Inflight


class Link(Protocol):
    """The connection to one scheduler. It calls the methods of its Replica with received
    results.
    """

    def add(self, handle: int, inflight: Inflight) -> None:
        """Sends a sequence with the tokens that it has generated. `handle` identifies the sequence
        in later calls. Sequences are sent soon, in the order of calls. If the session ends first,
        the sequence is not sent.
        """

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        """Sends the tokens that a turn adds to the first `num_tokens` tokens of a sequence that the
        scheduler keeps under `handle`.
        """

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:
        """Ends a sequence at the scheduler. No more results follow. `was_stopped` is true if a stop
        string ended the sequence.
        """
