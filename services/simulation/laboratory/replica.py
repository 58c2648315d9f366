"""A simulated replica: a real scheduler and pool, and a simulated device."""

from bisect import bisect_right
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol, TypeVar

from services.common.pool.ids import RequestKey
from services.common.request.finish import Finish
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.request.inflight import Inflight
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.replica_state import Connect
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.planning.steady_steps import (
    next_is_empty,
    num_steady_steps,
    skip_steps,
)
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from services.simulation.laboratory.clock import Event, EventClock
from services.simulation.laboratory.device import Device
from services.simulation.laboratory.live import SentTurn
from services.simulation.laboratory.tier import SimulatedTier

T = TypeVar("T")

_NO_TOKEN: tuple[int, ...] = ()


class Observer(Protocol):
    """Receives the events of a replica in order."""

    def admitted(self, sent: SentTurn, request: Request, now: float) -> None: ...

    def recomputes(self, num_tokens: int) -> None:
        """Called when a preempted request will compute `num_tokens` tokens once more."""

    def first_token(self, sent: SentTurn, now: float) -> None: ...

    def ended(self, sent: SentTurn, request: Request, now: float) -> None: ...


class SimulatedReplica:
    """A scheduler, its pool and its device. Implements the gateway's Link. As in the engine loop,
    the next step is planned when a step ends: before that step's output is applied if scheduling is
    asynchronous, and after it otherwise. Planning and messages take no time.

    Steps that differ only in their token counts (`steady_steps`) are not planned one by one. They
    are skipped together when the last of them ends, or when a request arrives. A request that
    arrives exactly when a skipped step ends is not part of the next step. A step that would be
    empty and change nothing is not planned.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        device: Device,
        clock: EventClock,
        observer: Observer,
        take_sent: Callable[[Inflight], SentTurn],
        pool: InProcessPool,
        connect: Connect | None = None,
        seconds_per_loaded_block: float = 0.0,
        *,
        may_skip: bool = True,
    ) -> None:
        """`take_sent` returns the SentTurn of a sequence that the gateway sends here. `connect`
        creates the scheduler's transfers to and from a tier of host memory, or is None without one.
        """
        self.pool = pool
        self.scheduler = Scheduler(config, self.pool, connect, clock=lambda: clock.now)
        self._tier = SimulatedTier(clock, seconds_per_loaded_block)
        self.replica: Replica
        self.num_steps = 0
        self.num_planned_steps = 0
        self.num_computed_tokens = 0
        self.on_added: Callable[[Request, SentTurn], object] = lambda _request, _sent: None
        self.watchers: list[Callable[[SchedulerOutput], object]] = []
        """Called after each planned step. Skipped steps are not planned."""
        self.on_pool_changed: Callable[[], object] = lambda: None
        """Called after each transaction with the pool."""
        self._device = device
        self._clock = clock
        self._observer = observer
        self._take_sent = take_sent
        self._may_skip = may_skip
        self._keys = count(1)
        self._sent: dict[Request, SentTurn] = {}
        self._lost: dict[Request, int] = {}
        """Maps preempted requests to the number of tokens that they had computed."""
        self._without_output: set[Request] = set()
        self._running: SchedulerOutput | None = None
        self._step_ends: list[float] = []
        """The end times of the running step and of the later steps that will be skipped."""
        self._end_event: Event | None = None
        self._awaits_load = False
        """Whether a call of `_load_ended` is scheduled."""

    # Methods of the gateway's Link.

    def add(self, handle: int, inflight: Inflight) -> None:
        sent = self._take_sent(inflight)
        sent.handle = handle
        self._stop_skipping()
        request = sent.make_request(RequestKey(next(self._keys)), self._clock.now)
        self.on_added(request, sent)
        self._sent[request] = sent
        self._without_output.add(request)
        self.scheduler.add(request)
        if self._running is None:
            self._clock.call_at(self._clock.now, self._begin)

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:  # noqa: ARG002
        raise AssertionError("no request of the laboratory is a session")

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:  # noqa: ARG002
        raise AssertionError("no request of the laboratory is aborted")

    def end_turn(self, handle: int, tool: str) -> None:  # noqa: ARG002
        raise AssertionError("the laboratory's clients name their tools themselves")

    # The work of the engine loop.

    def finish(self) -> None:
        """Releases what ended requests still occupy, as the engine loop does after its last one."""
        while self.scheduler.has_work:
            if self._plan().requests:
                raise AssertionError("a request is left")

    def _begin(self) -> None:
        """Begins a step if none runs. It includes all requests that arrived at this time."""
        if self._running is None and self.scheduler.has_requests:
            self._run(self._plan())

    def _plan(self) -> SchedulerOutput:
        plan = run_now(self.scheduler.schedule())
        self.num_planned_steps += 1
        for preemption in plan.preemptions:
            self._lost[preemption.victim] = preemption.num_lost_tokens
        if plan.new or plan.resumed:
            self._note_admissions(plan)
        if plan.kv_connector_metadata is not None:
            self._tier.begin(plan.kv_connector_metadata)
        for watch in self.watchers:
            watch(plan)
        self.on_pool_changed()
        return plan

    def _run(self, plan: SchedulerOutput) -> None:
        """Runs a step on the idle device. A step without tokens ends at once."""
        if not plan.requests:
            self._update(plan)
            return
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        self._running = plan
        seconds = self._device.seconds(plan)
        if self.scheduler.retention is not None:
            self.scheduler.step_costs.observe(len(plan.requests), plan.num_tokens, seconds)
        ends = self._step_ends = [self._clock.now + seconds]
        if self._may_skip and not self._without_output:
            num_steps = num_steady_steps(self.scheduler, plan, self.pool.num_skippable_blocks)
            if num_steps:
                num_requests = len(plan.requests)
                context = sum(plan.num_computed_tokens) + 2 * num_requests
                ends += self._device.decode_ends(ends[0], num_requests, context, num_steps)
        self._end_event = self._clock.call_at(ends[-1], self._end)

    def _end(self) -> None:
        """Called when the running step ends, or the last of the steps that are skipped."""
        self.catch_up()
        plan, self._running = self._running, None
        assert plan is not None
        if self.scheduler.config.async_scheduling:
            is_left_out = self._may_skip and next_is_empty(self.scheduler)
            has_next = self.scheduler.has_requests and not is_left_out
            following = self._plan() if has_next else None
            if following is not None and following.requests:
                # The output is applied first, since steps are skipped only if no output is missing.
                self._update(plan)
                self._run(following)
                return
            self._update(plan)
            if following is not None:
                self._run(following)
        else:
            self._update(plan)
        if self.scheduler.has_requests:
            self._run(self._plan())
            if self._running is None:
                self._begin_again()

    def _begin_again(self) -> None:
        """Plans again after an empty step, whose update may have made a request schedulable."""
        self._run(self._plan())
        if self._running is None and not self.scheduler.has_transfers:
            raise AssertionError("requests wait, but none runs and the policy admits none")

    def _load_ended(self) -> None:
        """Plans an empty step, which reports the end of a load from the tier, and a second step,
        which may run the load's request. Does nothing while a step runs.
        """
        self._awaits_load = False
        for _ in range(2):
            if self._running is None:
                self._run(self._plan())

    def catch_up(self) -> bool:
        """Skips the steps that have ended by now. Returns whether there were any."""
        ends = self._step_ends
        num_ended = bisect_right(ends, self._clock.now, 0, len(ends) - 1) if len(ends) > 1 else 0
        if not num_ended:
            return False
        assert self._running is not None
        self._skip(self._running, num_ended)
        del ends[:num_ended]
        return True

    def _stop_skipping(self) -> None:
        """Skips the steps that have ended by now. Later steps are planned as usual."""
        self.catch_up()
        if len(self._step_ends) > 1:
            del self._step_ends[1:]
            assert self._end_event is not None
            self._end_event.cancel()
            self._end_event = self._clock.call_at(self._step_ends[0], self._end)

    def _skip(self, plan: SchedulerOutput, num_steps: int) -> None:
        tokens = [[self._sent[request].own_token] * num_steps for request in plan.requests]
        run_now(skip_steps(self.scheduler, plan, num_steps, tokens))
        self.num_steps += num_steps
        self.num_computed_tokens += num_steps * len(plan.requests)
        self.on_pool_changed()

    def _update(self, plan: SchedulerOutput) -> EngineCoreOutputs:
        sent, chunks = self._sent, plan.prefill_chunks
        tokens = [
            _NO_TOKEN if request in chunks else (sent[request].own_token if request in sent else 0,)
            for request in plan.requests
        ]
        answer = ModelRunnerOutput(tokens, kv_transfers=self._tier.take_ended())
        update = self.scheduler.update_from_output(plan, answer)
        if self._tier.is_loading and not self._awaits_load:
            self._awaits_load = True
            self._clock.call_at(self._tier.next_end, self._load_ended)
        if self._without_output:
            self._note_first_tokens(plan, update)
        for request in update.ended:
            ended, output = sent.pop(request), request.token_ids[request.num_prompt_tokens :]
            ended.inflight.tokens(output[1:])
            assert request.finish_reason is not None
            self._observer.ended(ended, request, self._clock.now)
            self.replica.finished(ended.handle, Finish(request.finish_reason))
            ended.inflight.mailbox.take()
            ended.inflight.mailbox.close()
        return update

    def _note_admissions(self, plan: SchedulerOutput) -> None:
        for request in plan.new:
            sent = self._sent[request]
            self._observer.admitted(sent, request, self._clock.now)
            self.replica.admitted(sent.handle, request.num_cached_tokens or 0)
        if plan.resumed:
            starts = dict(zip(plan.requests, plan.num_computed_tokens, strict=True))
            for request in plan.resumed:
                again = max(0, self._lost.pop(request) - starts[request])
                self._observer.recomputes(again)

    def _note_first_tokens(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        for request, tokens in zip(plan.requests, update.token_ids, strict=True):
            if tokens and request in self._without_output:
                self._without_output.discard(request)
                sent = self._sent[request]
                sent.inflight.tokens([tokens[0]])
                self._observer.first_token(sent, self._clock.now)


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the scheduler waited for an event that the simulation does not have")
