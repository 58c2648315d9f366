"""Queues of the waiting requests."""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import WaitReason, preparation_wait
from services.scheduler.core.policies.policy import RequestQueue, SchedulingPolicy
from services.scheduler.core.request import Request, RequestStatus


class WaitingRequests:
    """The queues of a replica's waiting requests, each in the order of the scheduling policy.

    Requests that hold blocks are in `kv_waiting`. A step tries to admit them before the requests in
    `waiting`. A step skips (passes over) a request that it could not admit even if all blocks and
    rows were free. The request keeps its position in the queue.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.kv_waiting: RequestQueue = policy.create_request_queue()
        self.waiting: RequestQueue = policy.create_request_queue()
        self.held_back: dict[Request, None] = {}
        """Requests outside the queues, because `admitted_only` does not contain them."""
        self.admitted_only: Collection[Request] | None = None
        """The only requests that may be admitted in a fault search. None means all requests."""
        self.between_turns: dict[Request, None] = {}
        """Sessions (requests with several turns) that wait for input, the longest waiting first.
        Each counts as a running request.
        """
        self.passed_over: dict[Request, WaitReason] = {}
        """Maps skipped requests to the reason of the last skip. A request whose grammar or adapter
        must be prepared has an entry from its arrival on.
        """
        self._lost_blocks: dict[Request, None] = {}
        """Requests in `kv_waiting` that lost their blocks because the KV load of every block
        failed. They keep their position until a step skips them.
        """
        self._passed_without_blocks: list[Request] = []

    def __len__(self) -> int:
        return len(self.kv_waiting) + len(self.waiting) + len(self.held_back)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.kv_waiting, self.waiting, self.held_back)

    @property
    def queued(self) -> Iterator[Request]:
        """The requests that are not held back, in the order in which a step tries to admit them."""
        return chain(self.kv_waiting, self.waiting)

    @property
    def ready(self) -> Iterator[Request]:
        """The queued requests that were not skipped. They wait for blocks, rows or budget."""
        return (request for request in self.queued if request not in self.passed_over)

    @property
    def has_queued(self) -> bool:
        return bool(self.waiting or self.kv_waiting)

    @property
    def has_admissible(self) -> bool:
        """Whether a queued request can be admitted without waiting for an event."""
        return any(not request.is_blocked for request in self.queued)

    @property
    def has_admissible_with_blocks(self) -> bool:
        """Like `has_admissible`, for requests that hold blocks."""
        return any(not request.status.is_blocked for request in self.kv_waiting)

    def add(self, request: Request) -> None:
        """Queues a request that arrived, or a session after a turn."""
        if request.status is RequestStatus.WAITING_FOR_CHUNK:
            self.between_turns[request] = None
            self.passed_over[request] = WaitReason.SESSION
        elif request.grammar is not None:
            self.passed_over[request] = preparation_wait(request)
        if request.holds_blocks:
            self.kv_waiting.add(request)
        elif self.admitted_only is None or request in self.admitted_only:
            self.waiting.add(request)
        else:
            self.held_back[request] = None

    def begin_turn(self, session: Request, chunk: InputChunk, max_model_len: int) -> None:
        """Begins the next turn of a session that waits for input, and sorts the session's queue."""
        del self.between_turns[session]
        session.begin_turn(chunk, max_model_len)
        if session not in self.held_back:
            self.queue_of(session).reorder()

    def hold(self, request: Request) -> None:
        """Moves a waiting request to `kv_waiting`, because blocks were allocated for it."""
        self.passed_over[request] = WaitReason.REMOTE_KV
        if request in self._lost_blocks:
            del self._lost_blocks[request]
        else:
            self.waiting.remove(request)
            self.kv_waiting.add(request)

    def note_lost_blocks(self, request: Request) -> None:
        self._lost_blocks[request] = None

    def pass_over(self, request: Request, reason: WaitReason) -> None:
        self.passed_over[request] = reason
        if request in self._lost_blocks:
            self._passed_without_blocks.append(request)

    def requeue_without_blocks(self) -> None:
        """Moves requests that lost their blocks and were then skipped to the front of `waiting`."""
        for request in reversed(self._passed_without_blocks):
            del self._lost_blocks[request]
            self.kv_waiting.remove(request)
            self.waiting.prepend(request)
        self._passed_without_blocks.clear()

    def release(self, requests: Iterable[Request]) -> None:
        """Moves requests from `kv_waiting` to the front of `waiting`. The caller frees blocks."""
        for request in reversed(list(requests)):
            self.kv_waiting.remove(request)
            self._lost_blocks.pop(request, None)
            self.waiting.prepend(request)
        self._passed_without_blocks.clear()

    def is_held_back(self, request: Request) -> bool:
        """Whether a request in `kv_waiting` must not be admitted now."""
        return self.admitted_only is not None and request not in self.admitted_only

    def remove(self, request: Request) -> None:
        """Removes a request. Must be called before the request's blocks are freed."""
        self.between_turns.pop(request, None)
        self.passed_over.pop(request, None)
        if request in self.held_back:
            del self.held_back[request]
        else:
            self.queue_of(request).remove(request)
            self._lost_blocks.pop(request, None)

    def put_in_order(self) -> None:
        """Sorts the queues, because the ranks of requests may have changed."""
        self.kv_waiting.put_in_order()
        self.waiting.put_in_order()

    def queue_of(self, request: Request) -> RequestQueue:
        """The queue of a request that is not held back."""
        holds_blocks = request.holds_blocks or request in self._lost_blocks
        return self.kv_waiting if holds_blocks else self.waiting

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Allows only `requests` to be admitted, or all requests if it is None. All other requests
        are held back, including requests that arrive later. Requests in `waiting` are queued again
        in the order of arrival. Requests in `kv_waiting` stay there.
        """
        queued = sorted(chain(self.waiting, self.held_back), key=lambda request: request.key)
        self.admitted_only = requests
        self.waiting = self._policy.create_request_queue()
        self.held_back.clear()
        for request in queued:
            self.passed_over.pop(request, None)
            if requests is None or request in requests:
                self.waiting.add(request)
            else:
                self.held_back[request] = None
