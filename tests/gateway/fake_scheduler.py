"""A gRPC scheduler service that computes tokens by a formula.

The token at a position is a pure function of prompt, seed and position. So, as with the real
scheduler, a request that is sent again with its output so far continues with the same tokens. If
`answer` is set, every request gets the tokens of `answer` instead.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import FailedPrecondition, StepwellError
from services.common.pool.block_hash import unpack_token_ids
from services.common.rpc.protocol import own_release
from services.common.rpc.server import GrpcServer
from services.common.telemetry.metrics_servicer import serve_collect

VOCAB_SIZE = 320
# In the tests' tokenizer, tokens below this number are special.
FIRST_ORDINARY = 4
# The number of tokens for printable ASCII characters in the tests' tokenizers.
NUM_WHOLE_CHARACTERS = 94
# Seeds that tests set are smaller. A gateway draws seeds of 64 bits.
FIRST_DRAWN_SEED = 2**32

FULL = scheduler_pb2.Rejection(
    code=8, reason="QUEUE_FULL", message="the queue is full", retry_after_millis=1500
)


@dataclass
class Sequence:
    add: scheduler_pb2.AddRequest
    prompt: list[int]
    output: list[int]
    is_new: bool = True


def same_logprob(_token_id: int) -> float:
    return -0.5


@dataclass
class FakeScheduler(
    scheduler_pb2_grpc.SchedulerServicer, scheduler_pb2_grpc.SchedulerAdminServicer
):
    """Serves the sessions (streams) of gateways. Tests may change the attributes at any time."""

    model_name: str = "tiny"
    max_model_len: int = 512
    max_request_tokens: int = 480
    eos_token_ids: tuple[int, ...] = (0,)
    priority_scheduling: bool = True
    hidden_size: int = 4
    # The tokens of every answer. If None, `formula` computes them.
    answer: list[int] | None = None
    # The number of further steps that may run. None means no limit.
    permits: int | None = None
    tokens_per_step: int = 1
    rejection: scheduler_pb2.Rejection | None = None
    engine_error: str = ""
    engine_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_NAN_IN_LOGITS
    # The maximum number of concurrent requests. More requests are refused.
    max_requests: int | None = None
    num_cached_tokens: int = 0
    # The maximum number of running sequences, as reported to gateways. 0: none is reported.
    max_num_seqs: int = 0
    fingerprint: bytes = b"f" * 32
    tokenizer_fingerprint: bytes = b""
    heartbeat_seconds: float = 0.2
    # The reported times of each request.
    times: scheduler_pb2.RequestTimes | None = None
    # Returns the log-probability of a token, at any position.
    logprob: Callable[[int], float] = same_logprob
    # Whether resets of the prefix cache are refused.
    blocks_in_use: bool = False
    # The state of the waiting queue that was reported last.
    queue: scheduler_pb2.QueueState | None = None
    # The text of the metrics, in which "{labels}" is replaced. If None, metrics are not served.
    metrics: str | None = None
    # A name of the process, which is another after a restart.
    incarnation: str = "1"
    # The steps that GetActivity reports.
    steps: list[scheduler_pb2.StepActivity] = field(default_factory=list)
    blocks: common_pb2.BlockMap | None = None
    programs: list[scheduler_pb2.PausedProgram] = field(default_factory=list)
    # The received messages, by kind.
    looks: list[scheduler_pb2.GetActivityRequest] = field(default_factory=list)
    asked_for_spans: list[scheduler_pb2.GetRunningSpansRequest] = field(default_factory=list)
    adds: list[scheduler_pb2.AddRequest] = field(default_factory=list)
    # The number of requests in each message that adds several requests.
    added_together: list[int] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    # Requests that were aborted because a stop string ended their text.
    stopped: list[str] = field(default_factory=list)
    # The number of messages with aborts that will be lost.
    num_lost_aborts: int = 0
    keeps: list[scheduler_pb2.KeepTrace] = field(default_factory=list)
    num_sessions: int = 0
    operators_calls: list[str] = field(default_factory=list)
    paused: bool = False
    address: str = ""

    def __post_init__(self) -> None:
        self._server: GrpcServer | None = None
        self._sessions: list[_Session] = []
        self._state = scheduler_pb2.ReplicaState(ready=True)
        self._is_hung = False
        self.refusal: StepwellError | None = None
        """The error that refuses every session. If None, sessions are accepted."""

    async def start(self, address: str = "") -> str:
        """Serves at `address`, the previous address or a free port. Returns the address."""
        self._is_hung = False
        self._server = GrpcServer()
        register: Any = scheduler_pb2_grpc.add_SchedulerServicer_to_server
        self._server.add(register, self, "stepwell.scheduler.v1.Scheduler")
        register = scheduler_pb2_grpc.add_SchedulerAdminServicer_to_server
        self._server.add(register, self, "stepwell.scheduler.v1.SchedulerAdmin")
        if self.metrics is not None:
            serve_collect(self._server, self._collect)
        self.address = await self._server.start(address or self.address or "127.0.0.1:0")
        return self.address

    async def _collect(self, labels: Mapping[str, str], _exemplars: bool) -> bytes:
        assert self.metrics is not None
        added = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return self.metrics.replace("{labels}", f"{{{added}}}").encode()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serves until the `with` block ends. Yields the address."""
        try:
            yield await self.start()
        finally:
            await self.die()

    async def die(self) -> None:
        """Ends the server and its sessions at once, like a killed process."""
        assert self._server is not None
        await self._server.drain(0)
        self._sessions.clear()

    def allow(self, num_steps: int) -> None:
        self.permits = (self.permits or 0) + num_steps
        self.wake()

    def run_freely(self) -> None:
        self.permits = None
        self.wake()

    def set_state(
        self, *, ready: bool, reason: str = "", draining: bool = False, stalled: bool = False
    ) -> None:
        """Reports to gateways whether steps can run. The fake itself runs all allowed steps."""
        self._state = scheduler_pb2.ReplicaState(
            ready=ready, reason=reason, draining=draining, stalled=stalled
        )
        for session in self._sessions:
            session.state_unsent = True
        self.wake()

    def set_queue(self, **fields: Any) -> None:
        self.queue = scheduler_pb2.QueueState(**fields)
        for session in self._sessions:
            session.queue_unsent = True
        self.wake()

    def hang(self) -> None:
        """Sends nothing more until the next `start`."""
        self._is_hung = True

    def end_sessions(self) -> None:
        for session in self._sessions:
            session.is_over = True
        self.wake()

    @property
    def state(self) -> scheduler_pb2.ReplicaState:
        return self._state

    @property
    def is_hung(self) -> bool:
        return self._is_hung

    def wake(self) -> None:
        for session in self._sessions:
            session.changed.set()

    @property
    def num_running(self) -> int:
        return sum(len(session.sequences) for session in self._sessions)

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest], _context: object
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        if self.refusal is not None:
            raise self.refusal
        session = _Session(self)
        self._sessions.append(session)
        self.num_sessions += 1
        reader = asyncio.create_task(session.read(requests))
        try:
            if self._is_hung:
                await asyncio.Event().wait()
            yield session.numbered(scheduler_pb2.SessionResponse(opened=self.opened()))
            async for response in session.news():
                yield session.numbered(response)
        finally:
            reader.cancel()
            if session in self._sessions:
                self._sessions.remove(session)

    async def GetStats(  # noqa: N802
        self, _request: scheduler_pb2.GetStatsRequest, _context: object
    ) -> scheduler_pb2.GetStatsResponse:
        return scheduler_pb2.GetStatsResponse(
            incarnation=self.incarnation,
            model_name=self.model_name,
            num_running=self.num_running,
            num_steps=7,
            paused=self.paused,
        )

    async def GetRunningSpans(  # noqa: N802
        self, request: scheduler_pb2.GetRunningSpansRequest, _context: object
    ) -> scheduler_pb2.GetRunningSpansResponse:
        self.asked_for_spans.append(request)
        return scheduler_pb2.GetRunningSpansResponse()

    async def GetActivity(  # noqa: N802
        self, request: scheduler_pb2.GetActivityRequest, _context: object
    ) -> scheduler_pb2.GetActivityResponse:
        self.looks.append(request)
        sequences = [one for session in self._sessions for one in session.sequences.values()]
        return scheduler_pb2.GetActivityResponse(
            stats=await self.GetStats(scheduler_pb2.GetStatsRequest(), _context),
            requests=[
                scheduler_pb2.RequestActivity(
                    key=number,
                    request_id=one.add.request_id,
                    state=scheduler_pb2.REQUEST_STATE_RUNNING,
                    num_prompt_tokens=len(one.prompt),
                    num_output_tokens=len(one.output),
                    trace_id=one.add.traceparent[3:35],
                )
                for number, one in enumerate(sequences, start=1)
            ],
            steps=[step for step in self.steps if step.step > request.after_step],
            blocks=self.blocks if request.max_cells else None,
            programs=self.programs,
        )

    async def Pause(  # noqa: N802
        self, request: scheduler_pb2.PauseRequest, _context: object
    ) -> scheduler_pb2.PauseResponse:
        self.operators_calls.append(scheduler_pb2.PauseMode.Name(request.mode))
        if self._is_hung:
            await asyncio.Event().wait()
        self.paused = True
        return scheduler_pb2.PauseResponse()

    async def Resume(  # noqa: N802
        self, _request: scheduler_pb2.ResumeRequest, _context: object
    ) -> scheduler_pb2.ResumeResponse:
        self.operators_calls.append("resume")
        self.paused = False
        return scheduler_pb2.ResumeResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: scheduler_pb2.ResetPrefixCacheRequest, _context: object
    ) -> scheduler_pb2.ResetPrefixCacheResponse:
        connector = ", reset_connector" if request.reset_connector else ""
        self.operators_calls.append(f"reset, preempt_running={request.preempt_running}{connector}")
        if self.blocks_in_use and not request.preempt_running:
            raise FailedPrecondition("requests still use blocks", reason="BLOCKS_IN_USE")
        return scheduler_pb2.ResetPrefixCacheResponse()

    async def Drain(  # noqa: N802
        self, _request: scheduler_pb2.DrainRequest, _context: object
    ) -> scheduler_pb2.DrainResponse:
        self.operators_calls.append("drain")
        self.set_state(ready=False, reason="an operator drained the replica", draining=True)
        return scheduler_pb2.DrainResponse(num_unfinished=self.num_running)

    async def Undrain(  # noqa: N802
        self, _request: scheduler_pb2.UndrainRequest, _context: object
    ) -> scheduler_pb2.UndrainResponse:
        self.operators_calls.append("undrain")
        self.set_state(ready=True)
        return scheduler_pb2.UndrainResponse()

    def opened(self) -> scheduler_pb2.SessionOpened:
        return scheduler_pb2.SessionOpened(
            release=own_release(),
            incarnation=self.incarnation,
            model_name=self.model_name,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            max_request_tokens=self.max_request_tokens,
            block_size=16,
            eos_token_ids=self.eos_token_ids,
            priority_scheduling=self.priority_scheduling,
            hidden_size=self.hidden_size,
            max_num_seqs=self.max_num_seqs,
            fingerprint=self.fingerprint,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
        )

    def token_at(self, sequence: Sequence, position: int) -> int:
        if self.answer is not None:
            return self.answer[position] if position < len(self.answer) else 0
        return formula(sequence.prompt, sequence.add.sampling.seed, position)


def formula(prompt: list[int], seed: int, position: int) -> int:
    """The token at an output position. With a seed that a test sets, it may be any ordinary token.
    With a seed that a gateway drew, it is a whole character, because a gateway delays incomplete
    characters, so that the text so far would depend on the random seed.
    """
    digest = sha256(f"{prompt}|{seed}|{position}".encode()).digest()
    drawn = seed >= FIRST_DRAWN_SEED
    num_tokens = NUM_WHOLE_CHARACTERS if drawn else VOCAB_SIZE - FIRST_ORDINARY
    return FIRST_ORDINARY + int.from_bytes(digest[:4], "little") % num_tokens


class _Session:
    def __init__(self, scheduler: FakeScheduler) -> None:
        self._scheduler = scheduler
        self.sequences: dict[int, Sequence] = {}
        self.changed = asyncio.Event()
        self.state_unsent = True
        self.queue_unsent = False
        self.is_over = False
        self._rejected: list[scheduler_pb2.Rejection] = []
        self._aborted: list[int] = []
        self._numbers = itertools.count(1)
        self._num_sent = self._num_ended = 0
        self._taken = 0, 0

    def numbered(self, response: scheduler_pb2.SessionResponse) -> scheduler_pb2.SessionResponse:
        self._num_sent += 1
        self._num_ended += len(response.deltas.finished) + len(response.deltas.rejected)
        if response.HasField("deltas"):
            response.deltas.num_ended = self._num_ended
        response.number = self._num_sent
        response.taken_number, response.num_taken_requests = self._taken
        return response

    async def read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest]) -> None:
        try:
            async for request in requests:
                self._taken = request.number, self._taken[1]
                self._hear(request)
                self.changed.set()
        except grpc.aio.AioRpcError:
            return

    def _hear(self, request: scheduler_pb2.SessionRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "add":
            self._add(request.add)
        elif kind == "adds":
            self._scheduler.added_together.append(len(request.adds.requests))
            for add in request.adds.requests:
                self._add(add)
        elif kind == "abort" and self._scheduler.num_lost_aborts:
            self._scheduler.num_lost_aborts -= 1
        elif kind == "abort":
            for handle in request.abort.handles:
                sequence = self.sequences.pop(handle, None)
                if sequence is not None:
                    self._aborted.append(handle)
                    self._scheduler.aborts.append(sequence.add.request_id)
                    if handle in request.abort.stopped_handles:
                        self._scheduler.stopped.append(sequence.add.request_id)
        elif kind == "keep":
            self._scheduler.keeps.append(request.keep)

    def _add(self, add: scheduler_pb2.AddRequest) -> None:
        self._taken = self._taken[0], self._taken[1] + 1
        self._scheduler.adds.append(add)
        rejection = self._scheduler.rejection
        if self._scheduler.num_running == self._scheduler.max_requests:
            rejection = FULL
        if rejection is not None:
            rejected = scheduler_pb2.Rejection()
            rejected.CopyFrom(rejection)
            rejected.handle = add.handle
            self._rejected.append(rejected)
            return
        assert add.handle not in self.sequences
        self.sequences[add.handle] = Sequence(
            add, unpack_token_ids(add.prompt_token_ids), unpack_token_ids(add.output_token_ids)
        )

    async def news(self) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        """Yields a session's messages: changed states, one message per step, and heartbeats."""
        scheduler = self._scheduler
        while not self.is_over:
            if scheduler.is_hung:
                await asyncio.Event().wait()
            if self.state_unsent:
                self.state_unsent = False
                yield scheduler_pb2.SessionResponse(state=scheduler.state)
            elif self.queue_unsent:
                self.queue_unsent = False
                yield scheduler_pb2.SessionResponse(queue=scheduler.queue)
            elif self._rejected:
                rejected, self._rejected = self._rejected, []
                deltas = scheduler_pb2.StepDeltas(step=next(self._numbers), rejected=rejected)
                yield scheduler_pb2.SessionResponse(deltas=deltas)
            elif self._aborted:
                reason = common_pb2.FINISH_REASON_ABORT
                ends = [scheduler_pb2.Finished(handle=one, reason=reason) for one in self._aborted]
                self._aborted = []
                deltas = scheduler_pb2.StepDeltas(step=next(self._numbers), finished=ends)
                yield scheduler_pb2.SessionResponse(deltas=deltas)
            elif self.sequences and scheduler.permits != 0:
                if scheduler.permits is not None:
                    scheduler.permits -= 1
                yield scheduler_pb2.SessionResponse(deltas=self._step())
                await asyncio.sleep(0)
            else:
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(self._scheduler.heartbeat_seconds):
                await self.changed.wait()
            self.changed.clear()
        except TimeoutError:
            self.state_unsent = True

    def _step(self) -> scheduler_pb2.StepDeltas:
        deltas = scheduler_pb2.StepDeltas(step=next(self._numbers))
        for handle, sequence in list(self.sequences.items()):
            if sequence.is_new:
                sequence.is_new = False
                deltas.admitted.add(
                    handle=handle, num_cached_tokens=self._scheduler.num_cached_tokens
                )
                self._prompt_logprobs(handle, sequence, deltas)
            self._advance(handle, sequence, deltas)
        return deltas

    def _advance(self, handle: int, sequence: Sequence, deltas: scheduler_pb2.StepDeltas) -> None:
        scheduler, sampling = self._scheduler, sequence.add.sampling
        made: list[int] = []
        finish = None
        if scheduler.engine_error:
            finish = scheduler_pb2.Finished(
                reason=scheduler.engine_reason, message=scheduler.engine_error
            )
        while finish is None and len(made) < scheduler.tokens_per_step:
            token = scheduler.token_at(sequence, len(sequence.output))
            sequence.output.append(token)
            made.append(token)
            finish = _finish(sequence.output, sampling)
        deltas.handles.append(handle)
        deltas.num_tokens.append(len(made))
        deltas.num_output_tokens.append(len(sequence.output))
        deltas.token_ids.extend(made)
        if sampling.HasField("logprobs"):
            rows = rows_of(made, sampling.logprobs, scheduler.logprob)
            deltas.logprobs.add(handle=handle, sampled=rows)
        if finish is not None:
            finish.handle = handle
            if scheduler.times is not None:
                finish.times.CopyFrom(scheduler.times)
            deltas.finished.append(finish)
            del self.sequences[handle]

    def _prompt_logprobs(
        self, handle: int, sequence: Sequence, deltas: scheduler_pb2.StepDeltas
    ) -> None:
        sampling = sequence.add.sampling
        if sampling.HasField("prompt_logprobs"):
            rows = rows_of(sequence.prompt[1:], sampling.prompt_logprobs, self._scheduler.logprob)
            deltas.logprobs.add(handle=handle, prompt=rows)


def rows_of(
    token_ids: list[int], num_top: int, logprob: Callable[[int], float] = same_logprob
) -> common_pb2.Logprobs:
    """Log-probabilities. The top tokens of a row are the sampled token and the ids after it."""
    rows = common_pb2.Logprobs(width=1 + num_top)
    for token in token_ids:
        best = [(token + k) % VOCAB_SIZE for k in range(num_top)]
        rows.token_ids.extend([token, *best])
        rows.logprobs.extend([logprob(token), *(logprob(token) - k for k in range(num_top))])
        rows.ranks.append(1)
    return rows


def _finish(
    output: list[int], sampling: common_pb2.SamplingParams
) -> scheduler_pb2.Finished | None:
    if len(output) >= sampling.min_tokens:
        if output[-1] in sampling.eos_token_ids:
            return scheduler_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP)
        if output[-1] in sampling.stop_token_ids:
            return scheduler_pb2.Finished(
                reason=common_pb2.FINISH_REASON_STOP, stop_token_id=output[-1]
            )
    if len(output) >= sampling.max_tokens:
        return scheduler_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH)
    repetition = sampling.repetition_detection
    for size in range(repetition.min_pattern_size, repetition.max_pattern_size + 1):
        if size and output[-size * repetition.min_count :] == output[-size:] * repetition.min_count:
            return scheduler_pb2.Finished(reason=common_pb2.FINISH_REASON_REPETITION)
    return None
