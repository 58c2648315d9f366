"""The answer to all requests under one key."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import StepwellError
from services.gateway.core.admission.wait import Wait
from services.gateway.core.fleet.route import Route
from services.gateway.core.fleet.sequence_trace import SequenceTrace
from services.gateway.core.idempotency.reader import Reader
from services.gateway.core.idempotency.recording import Recording
from services.gateway.core.ports import Made, Timer
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request with a key, as a client sent it."""

    scope: str
    """The name under which its answer is remembered, see IdempotencyKey."""
    fingerprint: bytes
    """Hash of its content: another request with the same key has another one."""
    num_sequences: int
    identity: Identity
    """What it gets if it is the first under its key."""
    build: Callable[[Identity], Generation]
    """Makes the generation of the same request under another identity."""


class KeyedRequest:
    """What is remembered under a key, the task that makes it, and its readers. It is the Source of
    the generations of all clients that ask for it.
    """

    def __init__(self, wanted: Wanted, on_left: Callable[["KeyedRequest"], None]) -> None:
        """`on_left` is called when a reader has closed."""
        self.scope = wanted.scope
        self.fingerprint = wanted.fingerprint
        self.identity = wanted.identity
        self.recording = Recording(wanted.num_sequences)
        self.routes: list[Route] = []
        """Where its sequences were sent from here, in order."""
        self.waits: list[Wait] = []
        """Waits of its sequences that did not go to a replica at once."""
        self.traces: list[SequenceTrace] = []
        """Where its sequences were from here."""
        self.readers: set[Reader] = set()
        self.build: Callable[[Identity], Generation] | None = None
        """Makes its generation; None once this gateway will not have to make the answer."""
        self.maker: asyncio.Task[None] | None = None
        """What makes the answer here; None if it is complete, made elsewhere, or not at all."""
        self.is_followed = False
        """Whether the answer is read from the log of another gateway, which makes it."""
        self.owns_log = False
        """Whether this gateway was the last to write the log that others find it by."""
        self.opening = asyncio.Lock()
        """Held while it is found out which gateway makes the answer."""
        self.timer: Timer | None = None
        """Stops or forgets the answer unless a client reads it by then."""
        self.num_bytes = 0
        """The memory that counts for it."""
        self._on_left = on_left
        self._on_making_ended: list[Callable[[Made], None]] = []

    @property
    def is_idle(self) -> bool:
        """Whether the answer is not complete, and is not being made as far as is known here."""
        return not (self.maker or self.is_followed or self.recording.is_complete)

    @property
    def is_unused(self) -> bool:
        """Whether it can be forgotten without a client noticing now."""
        busy = self.readers or self.maker or self.is_followed or self.opening.locked()
        return not busy

    def adopt(self, identity: Identity, recording: Recording) -> None:
        """Replaces what is remembered, which no client reads."""
        self.identity, self.recording = identity, recording

    def start(self, _requests: Sequence[EngineRequest]) -> Reader:
        self.stop_timer()
        reader = Reader(self.recording, self.routes, self.waits, self.traces, self._reader_left)
        self.readers.add(reader)
        return reader

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        if self.maker is None and not self.is_followed:
            call(self._made())
        else:
            self._on_making_ended.append(call)

    def making_ended(self) -> None:
        """Makes the calls of `when_making_ends`: the answer has ended, or is not made here now."""
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

    def _reader_left(self, reader: Reader) -> None:
        self.readers.discard(reader)
        self._on_left(self)
