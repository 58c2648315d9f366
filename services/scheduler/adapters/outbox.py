"""News for one gateway, collected until its stream takes them: one message per step, or per
several steps when the gateway reads slower than the engine steps. What waits is bounded by the
requests themselves.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.scheduler.core.request import FinishReason, Request

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.NAN_IN_LOGITS: common_pb2.FINISH_REASON_NAN_IN_LOGITS,
    FinishReason.REPETITION: common_pb2.FINISH_REASON_REPETITION,
    FinishReason.STEP_FAILED: common_pb2.FINISH_REASON_STEP_FAILED,
    FinishReason.QUEUE_TIMEOUT: common_pb2.FINISH_REASON_QUEUE_TIMEOUT,
}
_MESSAGES = {
    FinishReason.NAN_IN_LOGITS: "the model's logits held NaN: no token could be chosen",
    FinishReason.STEP_FAILED: "the workers were lost in every step of this request, "
    "also in those with no other request",
    FinishReason.QUEUE_TIMEOUT: "the request waited as long as it may and was not scheduled",
}


class Outbox:
    """Deltas of one session. Writers never wait; one reader waits, and takes all there is.

    Tokens of a step are kept as they came, parallel to their handles; only when the next ones come
    before they were taken are they put together by handle.
    """

    def __init__(self) -> None:
        self.has_news = False
        """Whether `take` has something to send."""
        self._step = 0
        self._handles: Sequence[int] = ()
        self._token_ids: Sequence[Sequence[int]] = ()
        self._untaken: dict[int, list[int]] = {}
        self._deltas = scheduler_pb2.StepDeltas()
        self._is_empty = True
        self._state: scheduler_pb2.ReplicaState | None = None
        self._queue: scheduler_pb2.QueueState | None = None
        self._waking = asyncio.Event()

    def admitted(self, handle: int, num_cached_tokens: int) -> None:
        """A request was scheduled for the first time."""
        self._deltas.admitted.add(handle=handle, num_cached_tokens=num_cached_tokens)
        self._is_empty = False

    def tokens(
        self, step: int, handles: Sequence[int], token_ids: Sequence[Sequence[int] | None]
    ) -> None:
        """New tokens of the requests of a step, parallel; requests without are passed over."""
        news = [tokens for tokens in token_ids if tokens]
        if len(news) < len(handles):
            handles = [handle for handle, tokens in zip(handles, token_ids, strict=True) if tokens]
        if news:
            self._put_together()
            self._step, self._handles, self._token_ids = step, handles, news
            self._is_empty = False

    def logprobs(self, handle: int, item: worker_pb2.RequestLogprobs) -> None:
        """Log-probabilities that go with new tokens, or of the prompt."""
        added = self._deltas.logprobs.add(handle=handle)
        if item.HasField("sampled"):
            added.sampled.CopyFrom(item.sampled)
        if item.HasField("prompt"):
            added.prompt.CopyFrom(item.prompt)
        self._is_empty = False

    def finished(self, handle: int, request: Request) -> None:
        """The end of a request."""
        if request.finish_reason is None:
            raise AssertionError(f"{request.request_id} has not ended")
        self._deltas.finished.add(
            handle=handle,
            reason=_FINISH_REASONS[request.finish_reason],
            stop_token_id=request.stop_token_id,
            message=_MESSAGES.get(request.finish_reason, ""),
        )
        self._is_empty = False

    def rejected(self, rejection: scheduler_pb2.Rejection) -> None:
        """A request was refused at the door."""
        self._deltas.rejected.append(rejection)
        self._is_empty = False
        self.flush()

    def state(self, state: scheduler_pb2.ReplicaState) -> None:
        """Whether the replica can run a step; replaces a state that was not taken."""
        self._state = state
        self._waking.set()

    def queue(self, state: scheduler_pb2.QueueState) -> None:
        """How long the queue is; replaces a state that was not taken."""
        self._queue = state
        self._waking.set()

    def flush(self) -> None:
        """Lets the reader have what was collected."""
        if not self._is_empty:
            self.has_news = True
            self._waking.set()

    def wake(self) -> None:
        """Lets the reader go on without news."""
        self._waking.set()

    async def wait(self) -> None:
        """Until there are news or states, or `wake` was called since the last were taken."""
        await self._waking.wait()
        self._waking.clear()

    def take_state(self) -> scheduler_pb2.ReplicaState | None:
        """The newest state, unless it was taken."""
        state, self._state = self._state, None
        return state

    def take_queue(self) -> scheduler_pb2.QueueState | None:
        """The newest state of the queue, unless it was taken."""
        queue, self._queue = self._queue, None
        return queue

    def take(self) -> scheduler_pb2.StepDeltas:
        """All news there are."""
        deltas, self._deltas = self._deltas, scheduler_pb2.StepDeltas()
        handles, token_ids = self._handles, self._token_ids
        if self._untaken:
            self._put_together()
            handles, token_ids = list(self._untaken), list(self._untaken.values())
            self._untaken = {}
        deltas.step = self._step
        deltas.handles.extend(handles)
        deltas.num_tokens.extend(map(len, token_ids))
        deltas.token_ids.extend(chain.from_iterable(token_ids))
        self._handles = self._token_ids = ()
        self._is_empty, self.has_news = True, False
        self._waking.clear()
        return deltas

    def _put_together(self) -> None:
        """Tokens that wait, by handle."""
        for handle, tokens in zip(self._handles, self._token_ids, strict=True):
            self._untaken.setdefault(handle, []).extend(tokens)
        self._handles = self._token_ids = ()
