"""Runs a scenario through the scheduler and the pool, and records their decisions.

The conformance tests compare the record with vLLM's recorded decisions, which have the same format.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from services.cli.replay.scheduler_run import as_added
from services.common.pool.ids import BlockId
from services.common.replica.pause_mode import PauseMode
from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.kv_transfer import NO_RESULTS
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request, RequestStatus
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.connector import connected
from tests.scenarios.control import ScenarioControl
from tests.scenarios.record import Record, request_ids
from tests.scenarios.recorded_request import RecordedRequest, recorded_reason
from tests.scenarios.scenario import (
    Abort,
    NextChunk,
    Pause,
    ResetEncoderCache,
    ResetPrefixCache,
    Scenario,
    Signal,
)
from tests.scenarios.stand_in_grammar import COMPILE_ERROR
from tests.scenarios.stand_in_model import StandInModel
from tests.scenarios.step_recorder import StepRecorder
from tests.scenarios.transfer_record import reported_transfers, transfers_after_step

if TYPE_CHECKING:
    from tests.scenarios.stand_in_connector import StandInConnector

_CHANGES = ("scheduled", "preempted", "outputs", "finished_recving", "finished_sending")
"""Fields of a step's record. If all of them are empty, no waiting request becomes schedulable."""


async def run_scenario(scenario: Scenario) -> Record:
    """Runs a scenario with a pool in this process, and returns the record."""
    config = scenario.config
    pool = InProcessPool(config)
    connector = scenario.make_connector()
    scheduler = Scheduler(config, pool, connected(connector))
    return await ScenarioRun(scenario, scheduler, pool.core, connector).run()


class ScenarioRun:
    """One run of a scenario. `core` is the KVPool behind the scheduler's pool client, in this
    process or over gRPC. Its free blocks are recorded.
    """

    def __init__(
        self,
        scenario: Scenario,
        scheduler: Scheduler,
        core: KVPool,
        connector: "StandInConnector | None" = None,
    ) -> None:
        self.scheduler = scheduler
        self._connector = connector
        self._scenario = scenario
        self._core = core
        self._requests: dict[str, RecordedRequest] = {}
        self._finished_since_plan: list[str] = []
        self._num_quiet_steps = 0
        self._in_flight: deque[tuple[int, SchedulerOutput]] = deque()
        self._model = StandInModel(
            scenario.config.num_speculative_tokens,
            pooling=scenario.config.pooling,
            grammars=scenario.grammars,
        )
        self._compiling: list[Request] = []
        self._depth = scenario.config.num_steps_in_flight
        self._control = ScenarioControl(scheduler)
        self._recorder = StepRecorder(scheduler, core, scenario.config)

    async def run(self) -> Record:
        steps: list[Record] = []
        last_event = max(self._scenario.events, default=0)
        status = "max_steps"
        for step in range(self._scenario.max_steps):
            record: Record = {"step": step}
            if self._connector is not None:
                self._connector.step = step
            self._compile(step, record)
            await self._apply_events(step, record)
            if self._has_requests or self._in_flight:
                await self._step(step, record)
                steps.append(_without_empty(record))
                if step > last_event and self._is_stuck(record):
                    status = "stuck"
                    break
                continue
            await self._abort_mid_step(step, record)
            if len(record) > 1:
                steps.append(record | {"idle": True})
            elif step > last_event:
                status = "left" if self.scheduler.requests else "done"
                break
        return {
            "name": self._scenario.name,
            "config": self._scenario.named_config,
            "status": status,
            "steps": steps,
            "requests": {name: own.entry() for name, own in self._requests.items()},
            "final": {
                "free": self._core.num_free_blocks,
                "num_cached_hashes": self._core.num_cached_hashes,
                "num_steps": len(steps),
            },
        }

    @property
    def _has_requests(self) -> bool:
        scheduler = self.scheduler
        waits = any(not request.status.is_blocked for request in scheduler.queues.queued)
        has_requests = scheduler.has_requests or (scheduler.pause_mode is None and waits)
        has_requests = has_requests or self._has_transfers
        return bool(has_requests or self._finished_since_plan)

    @property
    def _has_transfers(self) -> bool:
        """Whether further steps must run so that the scheduler reports the ends of transfers. Loads
        of waiting requests need no further steps in a pause with mode KEEP.
        """
        transfers = self.scheduler.transfers
        if transfers is not None and self.scheduler.pause_mode is PauseMode.KEEP:
            return bool(transfers._leaving)
        return self.scheduler.has_transfers

    def _is_stuck(self, record: Record) -> bool:
        """Whether requests wait for ever: no end of a step, transfer or request is pending, and the
        fields `_CHANGES` were empty in as many steps as can be in flight.
        """
        runs = any(plan.requests for _, plan in self._in_flight)
        transfers = self._connector is not None and self._connector.has_transfers
        happens = any((runs, self._finished_since_plan, transfers))
        changes = any(map(record.get, _CHANGES))
        waits = self._has_requests and self.scheduler.queues.has_admissible
        waits = waits and not (happens or changes)
        self._num_quiet_steps = self._num_quiet_steps + 1 if waits else 0
        return self._num_quiet_steps >= self._depth

    def _compile(self, step: int, record: Record) -> None:
        """Before a step, reports to the scheduler the grammars that have been compiled."""
        grammars = self._scenario.grammars
        done = [
            request for request in self._compiling if grammars[request.request_id].ready <= step
        ]
        for request in done:
            error = COMPILE_ERROR if grammars[request.request_id].error else ""
            self.scheduler.grammar_compiled(request, error)
        if done:
            record["grammar_ready"] = request_ids(done)
            self._compiling = [request for request in self._compiling if request not in done]

    async def _apply_events(self, step: int, record: Record) -> None:
        await self._complete_pauses(record)
        for event in self._scenario.events.get(step, ()):
            if isinstance(event, Request):
                self._add(step, as_added(event), record)
            elif isinstance(event, NextChunk):
                self._add_chunk(event, step, record)
            elif isinstance(event, ResetEncoderCache):
                self.scheduler.reset_encoder_cache()
                record["reset_encoder_cache"] = True
            elif isinstance(event, Abort):
                if not event.is_mid_step:
                    self._abort(step, event.request_id, record)
            else:
                await self._control_engine(step, event, record)
        await self.scheduler.flush()

    async def _control_engine(
        self, step: int, event: Pause | ResetPrefixCache | Signal, record: Record
    ) -> None:
        if isinstance(event, Pause):
            if event.mode is PauseMode.ABORT:
                for request_id in self._requests:
                    self._abort(step, request_id, record)
            await self._control.begin(event, record)
            await self._complete_pauses(record)
        elif isinstance(event, ResetPrefixCache):
            await self._control.reset(event, record)
        elif event is Signal.RESUME:
            self._control.resume(record)

    async def _complete_pauses(self, record: Record) -> None:
        if not (self._has_requests or self._in_flight):
            await self._control.idle(record)

    def _add(self, step: int, request: Request, record: Record) -> None:
        request_id = request.request_id
        record.setdefault("added", []).append(request_id)
        own = self._requests[request_id] = RecordedRequest(request)
        if 0 < request.num_tokens <= self._scenario.config.max_prompt_len:
            self.scheduler.add(request)
            if request.grammar is GrammarStatus.COMPILING:
                self._compiling.append(request)
        else:
            record.setdefault("rejected", []).append(request_id)
            request.status = RequestStatus.FINISHED
            own.finish_step = step

    def _add_chunk(self, event: NextChunk, step: int, record: Record) -> None:
        """Adds further input to a session. Input of an ended session is dropped, as in vLLM."""
        session = self._requests[event.request_id].request
        record.setdefault("added", []).append(event.request_id)
        if session.is_finished:
            record.setdefault("ignored", []).append(event.request_id)
            return
        self.scheduler.add_chunk(session, event.chunk)
        if session.is_finished:
            self._note_end(session, step)

    def _abort(self, step: int, request_id: str, record: Record) -> None:
        own = self._requests.get(request_id)
        if own is not None and not own.request.is_finished:
            record.setdefault("aborted", []).append(request_id)
            self.scheduler.abort(own.request)
            self._note_end(own.request, step)

    async def _abort_mid_step(self, step: int, record: Record) -> None:
        """Aborts what the scenario aborts between the plan and the output of a step."""
        for event in self._scenario.events.get(step, ()):
            if isinstance(event, Abort) and event.is_mid_step:
                self._abort(step, event.request_id, record)
                await self.scheduler.flush()

    def _note_end(self, request: Request, step: int) -> None:
        self._finished_since_plan.append(request.request_id)
        self._requests[request.request_id].finish_step = step

    async def _step(self, step: int, record: Record) -> None:
        scheduler = self.scheduler
        may_wait, checked = False, None
        self._recorder.before_step(record)
        if self._has_requests:
            self._recorder.before_plan(record)
            record["finished_before"] = sorted(self._finished_since_plan)
            self._finished_since_plan = []
            sampling = self._sampling_by_grammar()
            throttled = Signal.THROTTLE in self._scenario.events.get(step, ())
            plan = await scheduler.schedule(throttle_prefills=throttled)
            checked = plan if sampling.intersection(plan.requests) else None
            self._recorder.planned(plan, record)
            for request in plan.new:
                self._requests[request.request_id].planned(step)
            self._in_flight.append((step, plan))
            # Like vLLM, first plans further steps while fewer than the allowed number are in
            # flight, and only then waits for an output.
            may_wait = bool(plan.requests) or self._has_requests
        await self._abort_mid_step(step, record)
        self._recorder.before_update()
        if self._in_flight and (len(self._in_flight) == self._depth or not may_wait):
            self._update(step, record)
        if checked is not None:
            drafts = self._model.check_drafts(checked)
            record["drafts_checked"] = {
                request.request_id: tokens for request, tokens in drafts.items()
            }
        await scheduler.flush()
        self._recorder.after_step(record)
        if self._connector is not None:
            record |= transfers_after_step(scheduler, self._connector)

    def _sampling_by_grammar(self) -> set[Request]:
        """Running requests with a grammar for which a step in flight samples tokens. Their drafts
        for the next step can be checked only after this step.
        """
        return {
            request
            for request in self.scheduler.running
            if request.grammar is not None and request.num_output_placeholders > 0
        }

    def _update(self, step: int, record: Record) -> None:
        scheduler = self.scheduler
        planned_in, plan = self._in_flight.popleft()
        outputs: list[list[Any]] = []
        results = self._connector.results(planned_in) if self._connector else NO_RESULTS
        answer = self._model.execute(plan, self._reading(plan, results.invalid_block_ids))
        record["accepted"] = {
            request.request_id: len(answer.token_ids[index]) - 1
            for index, request in enumerate(plan.requests)
            if request in plan.draft_token_ids
        }
        if self._connector is not None:
            requests = [own.request for own in self._requests.values()]
            record |= reported_transfers(results, requests)
            answer = replace(answer, kv_transfers=results)
        update = scheduler.update_from_output(plan, answer)
        self._model.take_back(plan.dropped)
        for request, turn in update.turns.items():
            own = self._requests[request.request_id]
            own.turn, own.finish_step = turn, step
        for news in update:
            request, tokens = news.request, list(news.token_ids)
            own = self._requests[request.request_id]
            end = update.turns.get(request, request)
            reason = end.finish_reason and recorded_reason(end.finish_reason)
            if end.stop_token_id is not None:
                own.stop_token_id = end.stop_token_id
            outputs.append([request.request_id, tokens, reason, own.stop_token_id])
            own.token_ids += tokens
            if request.is_finished:
                self._note_end(request, step)
        record["update_of"], record["outputs"] = planned_in, outputs

    def _reading(self, plan: SchedulerOutput, blocks: Collection[BlockId]) -> set[Request]:
        """The running requests of a step whose block tables contain any of `blocks`."""
        transfers = self.scheduler.transfers
        if transfers is None or not blocks:
            return set()
        return {
            request
            for request in plan.requests
            if request.status is RequestStatus.RUNNING
            and any(not set(table).isdisjoint(blocks) for table in transfers._block_tables[request])
        }


def _without_empty(record: Record) -> Record:
    return {name: value for name, value in record.items() if value not in ([], {}, None)}
