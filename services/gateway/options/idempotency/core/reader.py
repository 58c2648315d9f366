"""Reads a recording on behalf of one client."""

from collections.abc import Callable

from services.common.errors import StepwellError
from services.gateway.core.admission.wait import Wait
from services.gateway.core.fleet.routing_decision import RoutingDecision
from services.gateway.core.fleet.sequence_trace import SequenceTrace
from services.gateway.core.request.delta import Delta
from services.gateway.options.idempotency.core.recording import Cursor, Recording


class Reader:
    """Returns the deltas of a recording from its beginning. Existing output is available at once,
    and new output when it is recorded. A generation uses it like an engine's mailbox.
    """

    def __init__(
        self,
        recording: Recording,
        routes: list[RoutingDecision],
        waits: list[Wait],
        traces: list[SequenceTrace],
        on_close: Callable[["Reader"], None],
    ) -> None:
        self.routes = routes
        self.waits = waits
        self.traces = traces
        self._recording = recording
        self._cursor = Cursor(recording, self._wake)
        self._on_close = on_close
        self._aborted: set[int] = set()
        self._cut_by: StepwellError | None = None
        self._on_news: Callable[[], None] | None = None
        self._is_closed = False

    def listen(self, on_news: Callable[[], None], _min_tokens: int = 1) -> None:
        """Calls `on_news` when there may be new deltas."""
        self._on_news = on_news

    def abort(self, index: int) -> None:
        """Stops reading a sequence. The recording continues."""
        self._aborted.add(index)

    def cut(self, error: StepwellError) -> None:
        """Ends the reader with an error. The recording is not changed."""
        self._cut_by = error
        self._wake()

    def close(self) -> None:
        """Closes the reader. Further calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._on_news = None
            self._cursor.close()
            self._on_close(self)

    def take(self) -> list[tuple[int, Delta]]:
        """The deltas so far. An error is returned only after all earlier output."""
        news = [
            (index, delta) for index, _, delta in self._cursor.take() if index not in self._aborted
        ]
        error = self._recording.error or self._cut_by
        if news or error is None:
            return news
        return [
            (index, Delta(error=error))
            for index, sequence in enumerate(self._recording.sequences)
            if sequence.finish is None and index not in self._aborted
        ]

    def _wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
