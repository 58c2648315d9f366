"""Collects changes of requests, such as arrivals and aborts, and applies them between two steps."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.common.pool.ids import ContextId
from services.common.request.finish import FinishReason
from services.scheduler.core.engine.batch_queue import BatchQueue
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import StepObserver
from services.scheduler.core.request import Request, RequestStatus


class PendingChanges:
    """Collects changes of a scheduler's requests. The engine loop applies the changes before it
    plans the next step, because they must not be applied while a step is planned. The methods may
    be called at any time from the engine's event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observer: StepObserver,
        batch_queue: BatchQueue,
        wake: asyncio.Event,
        report_ended: Callable[[Sequence[Request]], None],
    ) -> None:
        """Sets `wake` at each change. Calls `report_ended` with requests that end between steps."""
        self.arrivals: list[Request] = []
        self._scheduler = scheduler
        self._observer = observer
        self._batch_queue = batch_queue
        self._wake = wake
        self._report_ended = report_ended
        self._compiled: dict[Request, tuple[str, FinishReason]] = {}
        self._chunks: list[tuple[Request, InputChunk | None]] = []
        self._ends: dict[Request, FinishReason] = {}
        self._tools: list[tuple[Request | ContextId, str]] = []

    def __bool__(self) -> bool:
        return bool(self.arrivals or self._compiled or self._chunks or self._ends or self._tools)

    def add(self, request: Request) -> None:
        self.arrivals.append(request)
        self._wake.set()

    def abort(self, requests: Iterable[Request], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests: at once if the engine waits for a step's output, otherwise before the next
        step is planned. With the reason QUEUE_TIMEOUT, requests that were admitted before that time
        do not end, unless they were to end for another reason.
        """
        ends, earlier = dict.fromkeys(requests, reason), self._ends
        self._ends = ends | earlier if reason is FinishReason.QUEUE_TIMEOUT else earlier | ends
        if self._batch_queue.awaits_answer:
            self.apply()
        else:
            self._wake.set()

    def grammar_compiled(
        self, request: Request, error: str = "", reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """Records that the workers have compiled the grammar of a request. A non-empty `error`
        means that the compilation failed. The request then ends with `error` and `reason`.
        """
        self._compiled[request] = error, reason
        self._wake.set()

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        """Adds the next input of a session (a request with several turns). None ends the session:
        at once if it waits for input, otherwise after its present turn. Does nothing if it has
        ended.
        """
        self._chunks.append((session, chunk))
        self._wake.set()

    def has_chunk(self, session: Request) -> bool:
        """Whether an input or the end of the session was added and is not applied yet."""
        return any(one is session for one, _ in self._chunks)

    def end_turn(self, of: Request | ContextId, tool: str) -> None:
        """Records which tool an agent runs after one of its turns (requests). `of` is the turn's
        request, which has ended or ends with these changes, or the context (KV blocks for the next
        turn) that the turn has left in the pool.
        """
        self._tools.append((of, tool))
        self._wake.set()

    def apply(self) -> None:
        """Applies the changes in this order: ends, tools, arrivals, compiled grammars, inputs of
        sessions, and ends of requests that have just arrived. Ends precede arrivals, so that an
        agent's next request finds the context that its last request leaves.
        """
        ends, self._ends = self._ends, {}
        new = set(self.arrivals) if ends else set[Request]()
        if ends:
            self.end({one: reason for one, reason in ends.items() if one not in new})
        if self._tools:
            self._apply_tools()
        if self.arrivals:
            arrivals, self.arrivals = self.arrivals, []
            for request in arrivals:
                self._scheduler.add(request)
            self._observer.arrived(arrivals)
        if self._compiled:
            compiled, self._compiled = self._compiled, {}
            for request, (error, reason) in compiled.items():
                self._scheduler.grammar_compiled(request, error, reason)
        if self._chunks:
            self._apply_chunks()
        if new:
            self.end({one: reason for one, reason in ends.items() if one in new})

    def _apply_tools(self) -> None:
        tools, self._tools = self._tools, []
        for of, tool in tools:
            context = of.context if isinstance(of, Request) else of
            if context is not None:
                self._scheduler.end_turn(context, tool)

    def end(self, ends: Mapping[Request, FinishReason]) -> None:
        """Ends requests now, except those that have already ended."""
        ended = [request for request, reason in ends.items() if _can_end(request, reason)]
        for request in ended:
            self._scheduler.abort(request, ends[request])
        if ended:
            self._report_ended(ended)

    def _apply_chunks(self) -> None:
        chunks, self._chunks = self._chunks, []
        for session, chunk in chunks:
            if session.is_finished:
                continue
            begins = session.status is RequestStatus.WAITING_FOR_CHUNK
            self._scheduler.add_chunk(session, chunk)
            if session.is_finished:
                self._report_ended([session])
            elif begins:
                self._observer.arrived([session])


def _can_end(request: Request, reason: FinishReason) -> bool:
    if reason is FinishReason.QUEUE_TIMEOUT and request.num_cached_tokens is not None:
        return False  # was admitted in time
    return not request.is_finished
