"""Runs a world to its end: a simulated replica (engine, scheduler, pool and workers) in virtual
time.

In each tick, the external events of the world occur, the engine runs until it must wait, and the
workers answer one step. Nothing else influences the order of events, so all runs of a world are
equal.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.errors import Aborted, FailedPrecondition, Unavailable
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.common.telemetry.tracing import configure_tracing
from services.scheduler.adapters.telemetry.activity import WatchedSteps
from services.scheduler.adapters.telemetry.engine_metrics import SpeculationMetrics
from services.scheduler.adapters.telemetry.engine_observer import EngineObserver
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.engine.engine_core import EngineCore, EngineState
from services.scheduler.core.engine.queue_estimate import QueueEstimate, expected_tokens
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.kv_transfer import KVLoadFailurePolicy
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput, WaitReason
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import RECENT_STEPS
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from tests.scenarios.connector import ConnectorScript, connected
from tests.scheduler.fakes import Inbox, ReadinessLog
from tests.worlds.expected import check_answer
from tests.worlds.invariants import Before, PublishedContents, check_plan
from tests.worlds.pool import WorldPool
from tests.worlds.tier import WorldTier
from tests.worlds.workers import WorldWorkers
from tests.worlds.world import Arrival, Event, Incident, World

if TYPE_CHECKING:
    from services.scheduler.options.transfers.core.offloading_connector import OffloadingConnector
    from tests.scenarios.stand_in_connector import StandInConnector

TICK = 0.001
"""Length of a tick in seconds of virtual time."""
TICKS_IN_SECONDS = 0.1
"""Length of a tick in seconds by the clocks of the scheduling policy, whose programs pause for
seconds, and of the queue estimate, which is updated ten times a second.
"""
MAX_TICKS = 6000
"""The maximum number of ticks after the last external event. Worlds need fewer."""


class Life:
    """One run of a world. `happened` counts the events of all runs."""

    def __init__(self, world: World, happened: Counter[str]) -> None:
        config = world.config
        self.world = world
        self.happened = happened
        self.entries: list[Entry] = []
        self.requests: dict[str, Request] = {}
        self.inbox = Inbox()
        self.connector = self._new_connector()
        self.tier = WorldTier(world.num_tier_blocks) if world.num_tier_blocks else None
        self.offloading = self._new_offloading()
        self.pool = WorldPool(config, happened)
        self.workers = WorldWorkers(world, self.connector, self.tier)
        self.scheduler = RecordingScheduler(
            config,
            self.pool,
            self.entries.append,
            connected(self.connector or self.offloading),
            lambda: asyncio.get_running_loop().time() / TICK * TICKS_IN_SECONDS,
        )
        self.observer = _Observer(self)
        self._queue_estimate = QueueEstimate(config.max_running)
        self.engine = EngineCore(
            self.scheduler,
            self.workers,
            _Replica(self),
            self.inbox,
            self.observer,
            ReadinessLog(),
            lambda: asyncio.get_running_loop().time(),
        )
        if self.scheduler.retention is not None:
            self._observe_slow_steps()
        self._before: Before | None = None
        self.in_flight: list[SchedulerOutput] = []
        """Planned steps whose output the scheduler has not processed."""
        self._contents = PublishedContents(config, follows_states=not config.num_speculative_tokens)
        self._tasks: set[asyncio.Task[None]] = set()
        self._events = deque(world.events)
        self._compiling: list[tuple[int, Request, bool]] = []

    def _observe_slow_steps(self) -> None:
        """Makes prompt tokens look expensive to compute. Then in most worlds the scheduling policy
        values retained contexts (KV blocks of ended requests) higher than most requests that could
        use the blocks.
        """
        seconds = 10.0 ** -(self.world.number % 3)
        for _ in range(RECENT_STEPS):
            self.scheduler.step_costs.observe(1, 1, TICK)
            self.scheduler.step_costs.observe(1, 129, TICK + 128 * seconds)

    async def live(self) -> None:
        running = asyncio.create_task(self.engine.run())
        tick = 0
        while not self._is_over(tick):
            assert tick < self.world.last_tick + MAX_TICKS, self._stuck()
            self._come(tick)
            await asyncio.sleep(TICK)
            if running.done():
                running.result()
            self._estimate_queue(tick)
            self.workers.answer_next()
            tick += 1
        running.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(running, *self._tasks, return_exceptions=True)
        self.pool.check()
        self._check_ends()
        self.happened["worlds"] += 1
        self.happened["ticks"] += tick
        self.happened["worlds in which steps were put off"] += bool(
            self.engine.planning.seconds_put_off
        )

    def _is_over(self, tick: int) -> bool:
        return (
            tick > self.world.last_tick + 1
            and all(request.is_finished for request in self.requests.values())
            and not self.engine.unfinished
            and not self.workers.num_in_flight
            and not self.scheduler.has_work
            and (self.pool.is_lost or not self.pool.core.stats().num_requests)
        )

    def _stuck(self) -> str:
        states = [
            f"{request.request_id} {request.status.value}, {request.num_slots} slots"
            for request in self.scheduler.requests
        ]
        num_free = self.scheduler.kv_cache_manager.num_free_blocks
        return f"requests starve: {states}, {num_free} blocks are free"

    def _estimate_queue(self, tick: int) -> None:
        """Updates the queue estimate as a replica does. Checks that the estimate is plausible."""
        running, most = self.scheduler.running, self.world.config.max_running
        if self.engine.state is not EngineState.RUNNING:
            self._queue_estimate.stand_still()
            return
        expected = [
            expected_tokens(one.num_prompt_tokens, one.num_output_tokens, one.max_num_tokens)
            for one in running
        ]
        assert all(num <= self.world.config.max_model_len for num in expected)
        self._queue_estimate.sample(
            tick * TICKS_IN_SECONDS,
            num_running=len(running),
            num_waiting=self.engine.num_waiting,
            num_completed=len(self.inbox.ended),
            slowdown=self.observer.counts.step_costs.slowdown(len(running), most),
            num_tokens=self.workers.num_tokens,
            tokens_per_request=sum(expected) / len(expected) if expected else 0.0,
        )
        assert self._queue_estimate.service_seconds >= self._queue_estimate.seconds_per_request >= 0
        assert self.observer.counts.step_costs.seconds_per_prompt_token >= 0

    # External events

    def _come(self, tick: int) -> None:
        now = asyncio.get_running_loop().time()
        for arrival in self.world.arrivals:
            self._concern(arrival, tick, now)
        for due, request, is_failed in self._compiling:
            if due == tick:
                error = "it cannot be compiled" if is_failed else ""
                self.engine.changes.grammar_compiled(request, error, FinishReason.GRAMMAR_ERROR)
        while self._events and self._events[0].tick <= tick:
            self._suffer(self._events.popleft())
        if tick == self.world.last_tick + 1:
            self.pool.mid_plan.clear()
            self._begin(self.engine.resume())
        self.engine.abort_late(now)

    def _concern(self, arrival: Arrival, tick: int, now: float) -> None:
        if arrival.tick == tick:
            self.engine.changes.add(self._add(arrival, now))
        request = self.requests.get(arrival.name)
        if request is None:
            return
        for turn in arrival.turns:
            if turn.tick == tick:
                self.engine.changes.add_chunk(
                    request, InputChunk(turn.token_ids, turn.sampling, tick)
                )
        if arrival.close_at == tick:
            self.engine.changes.add_chunk(request, None)
        if arrival.abort_at == tick:
            self.engine.changes.abort([request])

    def _add(self, arrival: Arrival, now: float) -> Request:
        request = Request(
            arrival.name,
            len(self.requests) + 1,
            list(arrival.token_ids),
            arrival.num_prompt_tokens,
            arrival.sampling,
            priority=arrival.priority,
            arrival_time=arrival.tick,
            cache_salt=arrival.salt,
            adapter_digest=arrival.adapter,
            encoder_inputs=arrival.items,
            program=arrival.program,
            tenant=arrival.tenant,
            tenant_weight=3.0 if arrival.tenant else 1.0,
            tenant_max_retained_share=0.3 if arrival.tenant and self.world.number % 2 else 1.0,
            resumable=arrival.close_at is not None,
            reads_prefix_cache=arrival.reads_prefix_cache,
        )
        if arrival.must_start_within is not None:
            request.latest_start = now + arrival.must_start_within * TICK
        if (grammar := arrival.grammar) is not None:
            request.grammar = GrammarStatus.COMPILING
            self._compiling.append((max(grammar.ready, arrival.tick), request, grammar.error))
        if self.connector is not None and arrival.external is not None:
            self.connector.sources[request.key] = arrival.external
        if self.connector is not None and arrival.send_steps is not None:
            self.connector.send_steps[request.key] = arrival.send_steps
        self.requests[arrival.name] = request
        return request

    def _suffer(self, event: Event) -> None:
        self.happened[event.incident.name] += 1
        if event.mid_plan:
            self.pool.mid_plan.append(lambda: self._happen(event))
        else:
            self._happen(event)

    def _happen(self, event: Event) -> None:
        match event.incident:
            case Incident.PAUSE_KEEP | Incident.PAUSE_WAIT | Incident.PAUSE_ABORT:
                self._begin(self.engine.pause(PauseMode(event.incident.value)))
            case Incident.RESUME:
                self._begin(self.engine.resume())
            case Incident.RESET | Incident.RESET_RUNNING:
                self._begin(self._reset(event))
            case Incident.RESET_ENCODER_CACHE:
                self._begin(self._reset_encoder_cache())
            case Incident.LOSE_WORKERS:
                self.workers.lose(have_ended=bool(event.count % 2))
            case Incident.LOSE_POOL:
                self.pool.lose_after(event.count)
            case Incident.REPORT_LOSS:
                self.engine.lost(WorkersLost("a worker says so"))
            case Incident.BAD_TRANSACTION:
                self.pool.refuse(self.world.number + event.count)
            case Incident.DAMAGE_TIER:
                assert self.tier is not None
                self.tier.damage(event.count)

    def _begin(self, work: "asyncio._CoroutineLike[None]") -> None:
        async def suppressed() -> None:
            try:
                await work
            except (Aborted, FailedPrecondition, Unavailable) as error:
                self.happened[type(error).__name__] += 1

        self._tasks.add(asyncio.create_task(suppressed()))

    async def _reset(self, event: Event) -> None:
        preempts, resets_tier = event.incident is Incident.RESET_RUNNING, bool(event.count % 2)
        await self.engine.reset_prefix_cache(preempt_running=preempts, reset_connector=resets_tier)
        assert self.pool.core.num_cached_hashes == 0
        assert not (resets_tier and self.offloading is not None and len(self.offloading.index))

    async def _reset_encoder_cache(self) -> None:
        async with self.engine.standstill():
            self.scheduler.reset_encoder_cache()

    @property
    def _leaves_stale_hashes(self) -> bool:
        """Whether a failed load within a step may leave blocks to compute again. As in vLLM, the
        hashes of these blocks stay published until they are computed.
        """
        recomputes = self.world.config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE
        return recomputes and any(
            arrival.external is not None
            and arrival.external.failing_blocks
            and not arrival.external.is_async
            for arrival in self.world.arrivals
        )

    # Callbacks around a step

    def before_plan(self) -> None:
        if self.connector is not None:
            self.connector.step += 1
        self._before = Before.of(self.scheduler)

    def planned(self, plan: SchedulerOutput) -> None:
        assert self._before is not None
        check_plan(self.scheduler, self.pool.core, self._before, plan, self.in_flight)
        self.in_flight.append(plan)
        self.happened["preemptions"] += len(plan.preemptions)
        self.happened["drafts"] += sum(map(len, plan.draft_token_ids.values()))
        self.happened["loads"] += len(plan.loads)
        self.happened["copies"] += len(plan.copies)
        self.happened["waits for contexts"] += plan.wait_reason is WaitReason.RETAINED
        for reason in plan.passed_over.values():
            self.happened[f"passed over: {reason.value}"] += 1

    def updated(self, plan: SchedulerOutput, ended: Sequence[Request]) -> None:
        """Called after the output of a step is processed."""
        for request in ended:
            if request.context is not None and request.key % 3:  # otherwise no reported pause
                tool = self.world.arrivals[0].name if request.key % 4 else ""
                if request.key % 5:
                    self.engine.changes.end_turn(request.context, tool)
                else:
                    self.scheduler.end_turn(request.context, tool, ends=True)
                self.happened["ends of turns"] += 1
        self.in_flight = [later for later in self.in_flight if later.step > plan.step]
        self.workers.taken_in(plan)
        self._contents.learn(self.requests.values())
        if self.offloading is not None and self.tier is not None:
            self._contents.check_tier(self.offloading, self.tier, self.workers.model.cache)
        is_settled = not any(later.requests for later in self.in_flight)
        # The next transaction removes the hashes of blocks that were not loaded.
        is_evicted = not self.scheduler.kv_cache_manager.pending.evictions
        if is_settled and is_evicted and not self._leaves_stale_hashes:
            self._contents.check(self.pool.core, self.workers.model.cache)

    # At the end

    def _check_ends(self) -> None:
        for arrival in self.world.arrivals:
            request = self.requests[arrival.name]
            assert request.finish_reason is not None
            self.happened[request.finish_reason.name] += 1
            self.happened["hits"] += bool(request.num_cached_tokens)
            if not self.world.config.pooling:
                check_answer(self.world, arrival, request, self.inbox.tokens[arrival.name])
        assert (
            self.pool.is_lost or self.pool.core.num_free_blocks == self.world.config.num_blocks - 1
        )
        assert not self.scheduler.requests
        self._check_contexts()
        if self.offloading is not None:
            stats, index = self.offloading.stats, self.offloading.index
            self.happened["blocks stored in tiers"] += stats.num_stored_blocks
            self.happened["blocks loaded from tiers"] += stats.num_loaded_blocks
            self.happened["blocks damaged in tiers"] += stats.num_invalid_blocks
            self.happened["blocks replaced in tiers"] += index.num_evictions

    def _check_contexts(self) -> None:
        """Asserts that the policy knows every retained context that the pool has."""
        retention, contexts = self.scheduler.retention, self.pool.core._blocks.contexts
        if isinstance(retention, ProgramRetention) and contexts is not None:
            self.happened["contexts at the end"] += len(contexts._contexts)
            assert contexts._contexts.keys() <= {*retention._contexts, *retention._dropped}

    def _new_connector(self) -> "StandInConnector | None":
        """The KV connector of a world with external storage, but without a tier of host memory."""
        if self.world.config.kv_role is None or self.world.num_tier_blocks:
            return None
        return ConnectorScript(self.world.frees_are_awaited).make(self.world.config.block_size)

    def _new_offloading(self) -> "OffloadingConnector | None":
        """The KV connector for the tier of host memory, if the world has a tier."""
        if not self.world.num_tier_blocks:
            return None
        from services.scheduler.options.transfers.core.offloading_connector import (  # noqa: PLC0415
            OffloadingConnector,
        )

        return OffloadingConnector(self.world.config, self.world.num_tier_blocks)


class _Replica:
    """A `PoolAndWorkers` that restores the pool and the workers at once."""

    workers_were_ended = False

    def __init__(self, life: Life) -> None:
        self._life = life

    async def open(self) -> None:
        life = self._life
        life.pool.open()
        if life.workers.have_ended and life.offloading is not None:
            life.offloading.reset_cache()
        life.workers.renew()


class _Observer(EngineObserver):
    """The engine's observer, as in a replica. It also runs the checks of the world."""

    def __init__(self, life: Life) -> None:
        self.counts = StepCounts(life.scheduler.step_costs)
        tracer = StepTracer(
            configure_tracing("scheduler", "", 1.0),
            self.counts,
            lambda: life.scheduler.next_candidates,
            lambda _step, _reason: None,
            lambda: int(asyncio.get_running_loop().time() * 1e9),
        )
        super().__init__(tracer, RequestMetrics(), SpeculationMetrics(0), WatchedSteps())
        self._life = life

    def begin(self) -> str:
        self._life.before_plan()
        return super().begin()

    def planned(self, plan: SchedulerOutput) -> None:
        super().planned(plan)
        self._life.planned(plan)

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        super().lost(preempted, lost)
        self._life.in_flight.clear()

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        super().done(plan, update)
        self._life.updated(plan, update.ended)
