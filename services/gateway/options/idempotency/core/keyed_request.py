"""The answer that all requests with one idempotency key share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import StepwellError
from services.gateway.core.ports import Timer
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.engine import Made
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.wait import Wait
from services.gateway.core.routing_decision import RoutingDecision
from services.gateway.core.traces.sequence_trace import SequenceTrace
from services.gateway.options.idempotency.core.recording import Cursor, Recording


@dataclass(frozen=True, slots=True)
class Wanted:
    """A client's request with an idempotency key."""

    scope: str
    """The id under which the answer is stored (see IdempotencyKey.scope)."""
    fingerprint: bytes
    """A digest of the request's content, by which another request with the same key is detected."""
    num_sequences: int
    identity: Identity
    """The identity (id, seed, arrival time) of the answer, if this request is the first with its
    key.
    """
    build: Callable[[Identity], Generation]
    """Makes the Generation, which runs the request, with another identity."""


class KeyedRequest:
    """The answer that is stored under a key, the task that generates it, and its readers. All
    requests with the key read the answer from this object, which is the Source of their
    Generations.
    """

    def __init__(self, wanted: Wanted, on_left: Callable[["KeyedRequest"], None]) -> None:
        """`on_left` is called after a reader has closed."""
        self.scope = wanted.scope
        self.fingerprint = wanted.fingerprint
        self.identity = wanted.identity
        self.recording = Recording(wanted.num_sequences)
        self.routes: list[RoutingDecision] = []
        """The routing decisions for this gateway's sequences of the answer, in order of time."""
        self.waits: list[Wait] = []
        """The ended waits of sequences that were not sent to a replica at once."""
        self.traces: list[SequenceTrace] = []
        """The traces of the sequences that this gateway sent to replicas."""
        self.readers: dict[Reader, None] = {}
        self.build: Callable[[Identity], Generation] | None = None
        """Makes the answer's Generation. It is None if this gateway need not generate the
        answer.
        """
        self.maker: asyncio.Task[None] | None = None
        """The task that generates the answer, or None while this gateway does not generate it."""
        self.is_followed = False
        """Whether another gateway generates the answer, and this gateway reads it from the log."""
        self.owns_log = False
        """Whether this gateway made the last entry of the answer's log."""
        self.opening = asyncio.Lock()
        """Locked while the gateway that generates the answer is determined."""
        self.timer: Timer | None = None
        """The timer that stops or removes the answer when no client has read it for some time."""
        self.num_bytes = 0
        """The number of bytes of this answer that `KeyedRequests.num_bytes` includes."""
        self._on_left = on_left
        self._on_making_ended: list[Callable[[Made], None]] = []

    @property
    def is_idle(self) -> bool:
        """Whether the answer is incomplete, and this gateway neither generates nor follows it."""
        return not (self.maker or self.is_followed or self.recording.is_complete)

    @property
    def is_unused(self) -> bool:
        """Whether no client and no task uses the answer, so that it can be removed."""
        busy = self.readers or self.maker or self.is_followed or self.opening.locked()
        return not busy

    def adopt(self, identity: Identity, recording: Recording) -> None:
        """Replaces the identity and the recording. The answer must not have readers."""
        self.identity, self.recording = identity, recording

    def start(self, _requests: Sequence[EngineRequest]) -> "Reader":
        self.stop_timer()
        reader = Reader(self, self._reader_left)
        self.readers[reader] = None
        return reader

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        if self.maker is None and not self.is_followed:
            call(self._made())
        else:
            self._on_making_ended.append(call)

    def making_ended(self) -> None:
        """Runs the callbacks of `when_making_ends`. Called when the answer has ended or stopped."""
        calls, self._on_making_ended = self._on_making_ended, []
        for call in calls:
            call(self._made())

    def _made(self) -> Made:
        sequences = self.recording.sequences
        return Made(self.recording.num_tokens, tuple(one.num_cached_tokens for one in sequences))

    def cut(self, error: StepwellError) -> None:
        """Ends all readers with an error."""
        for reader in self.readers:
            reader.cut(error)

    def stop_timer(self) -> None:
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def _reader_left(self, reader: "Reader") -> None:
        self.readers.pop(reader, None)
        self._on_left(self)


class Reader:
    """Reads an answer's recording for one client, from the beginning. Existing output is available
    at once, and new output when it is recorded. A Generation uses a Reader in place of the engine's
    Mailbox.
    """

    def __init__(self, request: KeyedRequest, on_close: Callable[["Reader"], None]) -> None:
        self.routes, self.waits, self.traces = request.routes, request.waits, request.traces
        self._recording = request.recording
        self._cursor = Cursor(request.recording, self._wake)
        self._on_close = on_close
        self._aborted: set[int] = set()
        self._cut_by: StepwellError | None = None
        self._on_news: Callable[[], None] | None = None
        self._is_closed = False

    def listen(self, on_news: Callable[[], None], _min_tokens: int = 1) -> None:
        """Calls `on_news` when there may be new deltas."""
        self._on_news = on_news

    def abort(self, index: int) -> None:
        """Ignores further output of a sequence for this client. The recording continues."""
        self._aborted.add(index)

    def end_turn(self, index: int, tool: str) -> None:
        """Does nothing, because the task that generates the answer reports the tools."""

    def cut(self, error: StepwellError) -> None:
        """Makes `take` return an error. The recording is not changed."""
        self._cut_by = error
        self._wake()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_news = None
            self._cursor.close()
            self._on_close(self)

    def take(self) -> list[tuple[int, Delta]]:
        """Returns the deltas since the last call. An error is returned only after all output."""
        news = [
            (index, delta) for index, _, delta in self._cursor.take() if index not in self._aborted
        ]
        error = self._recording.error or self._cut_by
        if error is None:
            return news
        if news:
            self._wake()  # The next call returns the error.
            return news
        return self._failed(error)

    def _failed(self, error: StepwellError) -> list[tuple[int, Delta]]:
        """Returns deltas with the error for all unfinished sequences."""
        return [
            (index, Delta(error=error))
            for index, sequence in enumerate(self._recording.sequences)
            if sequence.finish is None and index not in self._aborted
        ]

    def _wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
