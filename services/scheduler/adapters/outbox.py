"""News for one gateway, collected until its stream takes them: one message per step, or per
several steps when the gateway reads slower than the engine steps. What waits is bounded by the
requests themselves.
"""

import asyncio
from collections.abc import Sequence

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
}
_MESSAGES = {FinishReason.NAN_IN_LOGITS: "the model's logits held NaN: no token could be chosen"}


class Outbox:
    """Deltas of one session. Writers never wait; `take` waits for something to send."""

    def __init__(self) -> None:
        self._step = 0
        self._tokens: dict[int, list[int]] = {}
        self._deltas = scheduler_pb2.StepDeltas()
        self._filled = asyncio.Event()

    def admitted(self, handle: int, num_cached_tokens: int) -> None:
        """A request was scheduled for the first time."""
        self._deltas.admitted.add(handle=handle, num_cached_tokens=num_cached_tokens)

    def tokens(self, step: int, handle: int, token_ids: Sequence[int]) -> None:
        """New tokens of a request."""
        self._step = step
        self._tokens.setdefault(handle, []).extend(token_ids)

    def logprobs(self, handle: int, item: worker_pb2.RequestLogprobs) -> None:
        """Log-probabilities that go with new tokens, or of the prompt."""
        added = self._deltas.logprobs.add(handle=handle)
        if item.HasField("sampled"):
            added.sampled.CopyFrom(item.sampled)
        if item.HasField("prompt"):
            added.prompt.CopyFrom(item.prompt)

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

    def rejected(self, rejection: scheduler_pb2.Rejection) -> None:
        """A request was refused at the door."""
        self._deltas.rejected.append(rejection)
        self.flush()

    def flush(self) -> None:
        """Lets the stream have what was collected."""
        self._filled.set()

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to send."""
        return self._filled.is_set()

    async def take(self) -> scheduler_pb2.StepDeltas:
        """All news there are, once there are some."""
        await self._filled.wait()
        self._filled.clear()
        deltas, self._deltas = self._deltas, scheduler_pb2.StepDeltas()
        tokens, self._tokens = self._tokens, {}
        deltas.step = self._step
        deltas.handles.extend(tokens.keys())
        deltas.num_tokens.extend(map(len, tokens.values()))
        deltas.token_ids.extend(token for ids in tokens.values() for token in ids)
        return deltas
