"""Generates the answer to a request with an idempotency key, whether or not clients read it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import StepwellError
from services.common.request.finish import Finish, FinishReason
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.delivery import Delivery, received
from services.gateway.core.request.delta import Delta, Progress
from services.gateway.core.request.engine import DeltaSource
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.request import EngineRequest
from services.gateway.options.idempotency.core.keyed_request import KeyedRequest, Reader


class ResumingEngine(Protocol):
    """An engine that can resume the sequences of an answer that another gateway has started."""

    def model_fingerprint(self) -> bytes:
        """Returns the fingerprint of the model in use, or b"" before a replica has connected."""

    def start(
        self, requests: Sequence[EngineRequest], progress: Sequence[Progress] = ()
    ) -> DeltaSource:
        """Starts sequences. If `progress` is given, its item i is the earlier output of sequence i,
        which the sequence continues. Sequences that have already ended are not started.
        """


async def make(engine: ResumingEngine, request: KeyedRequest, generation: Generation) -> None:
    """Continues an answer's sequences after the output in its recording until all have ended, and
    records the new output.

    If the request has stop strings or may call tools, `generation` converts the tokens to text, so
    that even while no client reads the answer, a stop string ends its sequence, and the name of a
    called tool is sent to the replica.
    """
    recording = request.recording
    tap = Tap(engine, request)
    if generation.request.stop or generation.request.output_form is not None:
        try:
            await Delivery(generation, tap, _NoReader()).run()
        except StepwellError as error:
            recording.fail(error)
        return
    tap.start(generation.sequences)
    try:
        while not recording.is_over:
            await tap.pump()
    finally:
        tap.close()


class Tap(Reader):
    """The Source of the `generation` in `make`. It records the engine's output, and returns the
    recorded output from the beginning.
    """

    def __init__(self, engine: ResumingEngine, request: KeyedRequest) -> None:
        super().__init__(request, lambda _: None)
        self._engine = engine
        self._source: DeltaSource | None = None

    def start(self, requests: Sequence[EngineRequest]) -> "Tap":
        source = self._source = self._engine.start(requests, self._recording.progress())
        self.routes += source.routes
        self.waits += source.waits
        source.routes, source.waits = self.routes, self.waits
        self.traces[:] = source.traces
        return self

    async def pump(self) -> None:
        """Waits for deltas (new output) from the engine, and records them."""
        assert self._source is not None
        self._recording.add(await received(self._source))

    def take(self) -> list[tuple[int, Delta]]:
        """Records the engine's new deltas. Returns the deltas since the last call. The first call
        also returns all output that was recorded before. An error is returned at once, because the
        engine may have no news after it.
        """
        assert self._source is not None
        self._recording.add(self._source.take())
        if (error := self._recording.error) is not None:
            return self._failed(error)
        return super().take()

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news` when the engine has new deltas."""
        assert self._source is not None
        self._source.listen(on_news, min_tokens)

    def abort(self, index: int) -> None:
        assert self._source is not None
        self._source.abort(index)
        self._recording.add([(index, Delta(finish=Finish(FinishReason.STOP)))])

    def end_turn(self, index: int, tool: str) -> None:
        assert self._source is not None
        self._source.end_turn(index, tool)

    def close(self) -> None:
        super().close()
        if self._source is not None:
            self._source.close()


class _NoReader:
    """A sink that discards the pieces. The text is needed only for stop strings and tool calls."""

    is_ready = True

    def put(self, _added: list[Piece]) -> None: ...

    async def drain(self) -> None: ...
