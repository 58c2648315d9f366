"""Collects the deltas (new tokens and ends of requests) for one gateway until they are sent. A
message contains the deltas of one step, or of several steps if the gateway reads slowly. The deltas
need limited memory, because the lengths of requests are limited.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain

from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.request.finish import FinishReason
from services.common.request.messages import finish_reason_to_proto
from services.scheduler.adapters.workers.converters import request_times_to_proto
from services.scheduler.core.request import Request

_MESSAGES = {
    FinishReason.ERROR: "an error that concerns only this request occurred",
    FinishReason.NAN_IN_LOGITS: "the model computed NaN in the logits, so no token could be "
    "sampled",
    FinishReason.STEP_FAILED: "every step with this request lost the workers or the kvpool, even "
    "steps without other requests",
    FinishReason.KV_LOAD_FAILED: "keys and values of the request could not be loaded from another "
    "replica or from host memory",
    FinishReason.QUEUE_TIMEOUT: "the request waited too long for its first step",
}


class Outbox:
    """The collected deltas of one gateway's session. Adding never waits. One task, the reader,
    waits for deltas, and removes all of them. The tokens of the last step are stored as lists
    parallel to the requests' handles. If they are still stored when the next step's tokens arrive,
    they are merged into one list for each handle.
    """

    def __init__(self) -> None:
        self.has_deltas = False
        """Whether the reader should call `take`."""
        self.num_quiet_calls = 0
        """Number of calls of `Sessions.announce_to_quiet` since a message was last removed."""
        self._step = 0
        self._num_ended = 0
        self._handles: Sequence[int] = ()
        self._token_ids: Sequence[Sequence[int]] = ()
        self._num_output: Sequence[int] = ()
        self._untaken: dict[int, list[int]] = {}
        self._num_output_of: dict[int, int] = {}
        """Maps a handle to its total number of output tokens, including `_untaken`."""
        self._response = scheduler_pb2.SessionResponse()
        self._deltas = self._response.deltas
        self._is_empty = True
        self._has_more_than_tokens = False
        """Whether the deltas include ends, log-probabilities or vectors."""
        self._state: scheduler_pb2.ReplicaState | None = None
        self._queue: scheduler_pb2.QueueState | None = None
        self._load: scheduler_pb2.ReplicaLoad | None = None
        self._are_reports_due = self._have_reports_waited = False
        self._woken = asyncio.Event()

    def admitted(self, handle: int, num_cached_tokens: int) -> None:
        self._deltas.admitted.add(handle=handle, num_cached_tokens=num_cached_tokens)
        self._is_empty = False

    def tokens(
        self,
        step: int,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int] | None],
        num_output: Sequence[int],
    ) -> None:
        """Adds the new tokens of a step, in lists parallel to `handles`. `num_output` counts all
        output tokens, including the new ones. Skips requests without new tokens.
        """
        new = [tokens for tokens in token_ids if tokens]
        if len(new) < len(handles):
            handles = [handle for handle, tokens in zip(handles, token_ids, strict=True) if tokens]
            num_output = [num for num, tokens in zip(num_output, token_ids, strict=True) if tokens]
        if new:
            self._merge_by_handle()
            self._step, self._handles, self._token_ids = step, handles, new
            self._num_output = num_output
            self._is_empty = False

    def logprobs(
        self, handle: int, item: worker_pb2.RequestLogprobs, num_tokens: int, num_skipped: int = 0
    ) -> None:
        """Adds log-probabilities of the prompt, without the first `num_skipped` rows, and of the
        first `num_tokens` sampled tokens. Later tokens may be drafts after the answer's end.
        """
        added = self._deltas.logprobs.add(handle=handle)
        if item.HasField("sampled"):
            added.sampled.CopyFrom(item.sampled)
            del added.sampled.token_ids[num_tokens * item.sampled.width :]
            del added.sampled.logprobs[num_tokens * item.sampled.width :]
            del added.sampled.ranks[num_tokens:]
        if item.HasField("prompt") and not 0 < len(item.prompt.ranks) <= num_skipped:
            added.prompt.CopyFrom(item.prompt)
            del added.prompt.token_ids[: num_skipped * item.prompt.width]
            del added.prompt.logprobs[: num_skipped * item.prompt.width]
            del added.prompt.ranks[:num_skipped]
        self._is_empty, self._has_more_than_tokens = False, True

    def pooled(self, handle: int, values: bytes) -> None:
        """Adds the vector of a prompt, before the request's end."""
        self._deltas.pooled.add(handle=handle, values=values)
        self._is_empty, self._has_more_than_tokens = False, True

    def finished(self, handle: int, request: Request) -> None:
        self._deltas.finished.append(_finished(handle, request))
        self._num_ended += 1
        self._is_empty, self._has_more_than_tokens = False, True

    def turn_ended(self, handle: int, turn: Request) -> None:
        """Adds the end of a turn of a client's session (a request with several turns)."""
        self._deltas.turns.append(_finished(handle, turn))
        self._is_empty, self._has_more_than_tokens = False, True

    def rejected(self, rejection: scheduler_pb2.Rejection) -> None:
        self._deltas.rejected.append(rejection)
        self._num_ended += 1
        self._is_empty, self._has_more_than_tokens = False, True
        self.flush()

    def announce(self, state: scheduler_pb2.ReplicaState) -> None:
        """Makes the reader send the replica's state (whether steps can run). If an earlier state
        was not sent yet, only the new state is sent.
        """
        self._state = state
        self._woken.set()

    def note_queue(self, queue: scheduler_pb2.QueueState) -> None:
        """Stores the queue state (length, expected waits), to be sent like the load."""
        self._queue = queue

    def note_load(self, load: scheduler_pb2.ReplicaLoad) -> None:
        """Stores the replica's load, to be sent with the next deltas, or after `report`."""
        self._load = load

    def report(self, *, may_wait: bool) -> None:
        """Makes the reader send the stored queue state and load even without deltas. With
        `may_wait`, only the second call in a row does, because deltas usually follow soon and
        include both.
        """
        if self._queue is None and self._load is None:
            return
        if may_wait and not self._have_reports_waited:
            self._have_reports_waited = True
        else:
            self._are_reports_due = True
            self._woken.set()

    def flush(self) -> None:
        """Wakes the reader if deltas were collected."""
        if not self._is_empty:
            self.has_deltas = True
            self._woken.set()

    def wake(self) -> None:
        """Wakes the reader, even if there is nothing to take."""
        self._woken.set()

    async def wait(self) -> None:
        """Waits until there are deltas or another message to send, or until `wake` is called."""
        await self._woken.wait()
        self._woken.clear()

    def take_announced(self) -> scheduler_pb2.SessionResponse | None:
        """Removes and returns a message to send without deltas: the replica's state, or else the
        queue state or the load, if `report` made them due and there are no deltas. None if there is
        none.
        """
        response = None
        if self._state is not None:
            response = scheduler_pb2.SessionResponse(state=self._state)
            self._state = None
        elif self._are_reports_due and not self.has_deltas:
            response = self._take_report()
        if response is not None:
            self.num_quiet_calls = 0
        return response

    def _take_report(self) -> scheduler_pb2.SessionResponse | None:
        if self._queue is not None:
            queue, self._queue = self._queue, None
            return scheduler_pb2.SessionResponse(queue=queue)
        self._are_reports_due = self._have_reports_waited = False
        if self._load is None:
            return None
        load, self._load = self._load, None
        return scheduler_pb2.SessionResponse(load=load)

    @property
    def may_be_taken_at_once(self) -> bool:
        """Whether the deltas are only tokens and admissions, and the reader has nothing else to do.
        Otherwise only the reader may take the deltas, because it may have to end the session.
        """
        return not (
            self._is_empty
            or self._has_more_than_tokens
            or self.has_deltas
            or self._state is not None
            or self._woken.is_set()
        )

    def take(self) -> scheduler_pb2.StepDeltas:
        """Removes and returns all deltas, together with the queue state and load to send."""
        return self.take_response().deltas

    def take_response(self) -> scheduler_pb2.SessionResponse:
        """Like `take`, but returns the message that contains the deltas."""
        response, deltas = self._response, self._deltas
        self._response = scheduler_pb2.SessionResponse()
        self._deltas = self._response.deltas
        deltas.SetInParent()
        handles, token_ids, num_output = self._handles, self._token_ids, self._num_output
        if self._untaken:
            self._merge_by_handle()
            handles, token_ids = list(self._untaken), list(self._untaken.values())
            num_output = list(self._num_output_of.values())
            self._untaken, self._num_output_of = {}, {}
        if self._queue is not None:
            deltas.queue.CopyFrom(self._queue)
        if self._load is not None:
            deltas.load.CopyFrom(self._load)
        self._queue = self._load = None
        self._are_reports_due = self._have_reports_waited = False
        deltas.step, deltas.num_ended = self._step, self._num_ended
        deltas.handles.extend(handles)
        deltas.num_tokens.extend(map(len, token_ids))
        deltas.token_ids.extend(chain.from_iterable(token_ids))
        deltas.num_output_tokens.extend(num_output)
        self._handles = self._token_ids = self._num_output = ()
        self._is_empty, self.has_deltas, self.num_quiet_calls = True, False, 0
        self._has_more_than_tokens = False
        self._woken.clear()
        return response

    def _merge_by_handle(self) -> None:
        """Merges the tokens of the last step into `_untaken`, the tokens of earlier steps."""
        for handle, tokens in zip(self._handles, self._token_ids, strict=True):
            self._untaken.setdefault(handle, []).extend(tokens)
        self._num_output_of.update(zip(self._handles, self._num_output, strict=True))
        self._handles = self._token_ids = self._num_output = ()


def _finished(handle: int, request: Request) -> scheduler_pb2.Finished:
    if request.finish_reason is None:
        raise AssertionError(f"{request.request_id} has not ended")
    return scheduler_pb2.Finished(
        handle=handle,
        reason=finish_reason_to_proto(request.finish_reason),
        stop_token_id=request.stop_token_id,
        message=request.error or _MESSAGES.get(request.finish_reason, ""),
        times=request_times_to_proto(request.times),
    )
