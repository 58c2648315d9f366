"""The scheduler decides which tokens of which requests each engine step computes."""

from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice

from services.common.pool.ids import BlockId, ContextId
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.planning.prefill_pacing import PrefillPacing
from services.scheduler.core.planning.replica_state import Connect, ReplicaState
from services.scheduler.core.planning.running_scheduler import RunningScheduler
from services.scheduler.core.planning.step_builder import PassingOver, StepBuilder
from services.scheduler.core.planning.step_encoder import StepEncoder
from services.scheduler.core.planning.step_update import StepUpdate
from services.scheduler.core.planning.waiting_scheduler import LOOKUP_BATCH, WaitingScheduler
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request, RequestStatus


class Scheduler(ReplicaState):
    """Plans the engine steps of one replica, with the same decisions as vLLM V1's scheduler.
    Allocates blocks in transactions with the kvpool service. Calls must not overlap, so only one
    engine loop may use a scheduler. The base class stores the running and the waiting requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVPool,
        connect: Connect | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`connect` creates the scheduler's side of a KV connector, and must be set if and only if
        `config.kv_role` is set. `clock` returns seconds. Only some policies read it.
        """
        if (connect is None) != (config.kv_role is None):
            raise ValueError("a connector and its kv_role go together")
        super().__init__(config, pool, connect, clock)
        self._waiting_scheduler = WaitingScheduler(self)
        self._running_scheduler = RunningScheduler(self, self._waiting_scheduler)
        self._update = StepUpdate(self)
        self._pacing = PrefillPacing(config.prefill_schedule_interval)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute tokens, or send operations to the pool or the workers."""
        if self.running and self.pause_mode is None:
            return True
        has_operations = bool(self.kv_cache_manager.pending or self.rows.removed)
        return has_operations or self.has_requests or self.has_transfers

    @property
    def only_frees(self) -> bool:
        """Whether a step would only free blocks and batch rows of ended requests."""
        has_commits = bool(self.kv_cache_manager.pending.commits)
        return not (self.running or self.queues or has_commits or self.has_transfers)

    @property
    def is_steady(self) -> bool:
        """Whether the next step would only compute tokens of running requests."""
        is_paced = self._pacing.is_on or self.kv_cache_manager.needs_steps
        return not (
            is_paced
            or self.queues
            or self.kv_cache_manager.pending
            or self.rows.removed
            or self.transfers
            or self.failed
            or self.pause_mode
            or self.holds_ended
        ) and self.config.token_budget >= len(self.running)

    @property
    def has_transfers(self) -> bool:
        """Whether a KV transfer is in progress. Only the output of a step reports its end."""
        return self.transfers is not None and self.transfers.is_busy

    @property
    def has_requests(self) -> bool:
        """Whether a request runs, or could be admitted without waiting for an event."""
        if self.pause_mode is None:
            return bool(self.running) or self.queues.has_admissible
        if self.pause_mode is PauseMode.WAIT:
            return bool(self.running) or self.queues.has_admissible_with_blocks
        return False

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.queues]

    @property
    def next_candidates(self) -> Iterable[Request]:
        return islice(self.queues.ready, min(self.num_free_slots, LOOKUP_BATCH))

    def add(self, request: Request) -> None:
        if self.config.pooling:
            request.max_num_tokens = request.num_prompt_tokens
        else:
            request.limit_length(self.config.max_model_len)
        self.queues.add(request)
        if self.retention is not None:
            self.retention.arrived(request)

    def end_turn(self, context: ContextId, tool: str, *, ends: bool = False) -> None:
        """Records which tool an agent runs after the request that left `context` (KV blocks for the
        agent's next request) in the pool. If `ends` is true, the agent sends no further request.
        Does nothing if the context is unknown.
        """
        if self.retention is not None:
            self.retention.end_turn(context, tool, ends=ends)

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        """Adds the next input of a session (a request with several turns) that has not ended. None
        ends the session: at once if it is between two turns, otherwise after its present turn.
        """
        if session.status is not RequestStatus.WAITING_FOR_CHUNK:
            session.chunks.append(chunk)
        elif chunk is None:
            session.finish(FinishReason.ABORT)  # not `abort`, which the step log would record
            self.remove(session)
        else:
            self.queues.begin_turn(session, chunk, self.config.max_model_len)

    def is_held_up_by_sessions(self, plan: SchedulerOutput) -> bool:
        """Whether the next step would be empty like `plan`, because all requests wait for blocks or
        batch rows of sessions between two turns, and no pending operation frees blocks.
        """
        return (
            bool(self.queues.between_turns or self.queues.kv_waiting)
            and not (plan.requests or self.running or self.transfers)
            and plan.wait_reason in (WaitReason.MAX_SEQS, WaitReason.NO_BLOCKS)
            and not self.kv_cache_manager.pending
        )

    def grammar_compiled(
        self, request: Request, error: str = "", reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """Records that the workers have compiled the grammar of a request. A non-empty `error`
        means that the compilation failed. The request then ends with `error` and `reason` when a
        step tries to admit it. Does nothing if the request has ended.
        """
        if request.is_finished:
            return
        request.grammar = GrammarStatus.READY
        if error:
            request.grammar = GrammarStatus.FAILED
            request.error, request.error_reason = error, reason

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        if not request.is_finished:
            request.finish(reason)
            self.remove(request)

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Allows only `requests` to be admitted, or all requests if it is None. All other requests
        are held back, including requests that arrive later. Queues all requests again, in the order
        of arrival. Frees the blocks of waiting requests, except blocks that a KV transfer is
        loading. Must not be called while a request runs.
        """
        if self.running:
            raise AssertionError("requests run that are to be held back")
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._release(one for one in self.queues.kv_waiting if one.status is not loading)
        self.queues.admit_only(requests)

    def pause(self, mode: PauseMode) -> None:
        """Pauses the engine until `resume` is called. In mode WAIT, the caller continues to plan
        steps, which admit only requests that have blocks. In mode ABORT, the caller must abort all
        requests.
        """
        self.pause_mode = mode

    def resume(self) -> None:
        self.pause_mode = None

    async def schedule(
        self, traceparent: str = "", *, throttle_prefills: bool = False
    ) -> SchedulerOutput:
        """Plans one step: chooses the tokens that the step computes, and allocates their blocks.

        There is no prefill phase and no decode phase. Each request has a list of tokens, and
        `num_computed_tokens` counts how many of them are computed. Each step divides a budget of
        tokens among the requests, so that every count catches up with its list:

        1. Running requests are scheduled first, in the order of their admission. One transaction
           with the pool allocates all their blocks. If blocks are missing, a running request that
           the policy selects is preempted, and planning resumes at the request that lacked blocks.
        2. If no request was preempted, waiting requests are admitted from the head of the queue.
           The cached prefix of a prompt counts as computed. Admission stops when the token budget,
           the rows of the batch or the free blocks are used up. A request that cannot be admitted
           for a reason of its own, such as a grammar that is not compiled yet, is skipped. It keeps
           its position in the queue, and the next request is tried.

        With `throttle_prefills`, prompts wait while requests decode (see `PrefillPacing`). During a
        pause of the engine, the step computes nothing, unless the pause mode is WAIT.
        """
        builder, pause_mode = self._new_builder(), self.pause_mode
        if pause_mode is not None and pause_mode is not PauseMode.WAIT:
            reason = WaitReason.PAUSED if self.queues else None
            return self._finish_step(builder, reason, computes=False)
        if throttle_prefills or self._pacing.is_on:
            builder.defers_prefills = self._pacing.defers_prefills(
                self.running, throttled=throttle_prefills
            )
        if self.retention is not None:
            self.retention.sweep()
            self.queues.put_in_order()
        self.kv_cache_manager.step_begins = self.kv_cache_manager.needs_steps
        if self.transfers is not None:
            self.transfers.begin_step()
        await self._running_scheduler.schedule(builder, traceparent)
        wait_reason: WaitReason | None = WaitReason.NO_BLOCKS
        if not builder.plan.preemptions:
            wait_reason = await self._waiting_scheduler.schedule(builder, traceparent)
            while wait_reason is WaitReason.NO_BLOCKS and not self.running and self._make_room():
                await self.kv_cache_manager.flush()
                wait_reason = await self._waiting_scheduler.schedule(builder, traceparent)
            if not builder.defers_prefills:
                self._pacing.left_waiting = (
                    wait_reason is not None and next(self.queues.ready, None) is not None
                )
            if wait_reason is WaitReason.NO_BLOCKS and not self.running:
                self._running_scheduler.preempt_waiting(builder)
        if self._pacing.is_on:
            self._pacing.planned(builder)
        if self.kv_cache_manager.copies:
            builder.plan.copies = await self.take_copies(builder.plan.step, traceparent)
        is_busy = self.running or self.queues or self.transfers or self.kv_cache_manager.pending
        if not (is_busy or self.holds_ended):
            self.kv_cache_manager.check_all_free()
        return self._finish_step(builder, wait_reason)

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Applies the output of a step. Appends the sampled tokens, even to requests that were
        preempted while the step ran. Discards tokens of requests that ended while the step ran, and
        of requests in `plan.dropped`. Ends complete requests. A session whose turn is complete
        begins its next turn if the input has arrived, and otherwise waits for the input.
        """
        return self._update.update(plan, output)

    def end_failed(self) -> list[Request]:
        """Ends waiting requests that can never be admitted. Returns them in order of arrival."""
        return self._update.end_failed()

    def preempt_all(self) -> list[Request]:
        """Preempts and returns all running requests. They are queued in their order of admission.
        Tokens that steps in flight sample for them will be discarded.
        """
        self.steps.drop(list(self.running))
        return self._running_scheduler.preempt_all()

    def forget_pool(self) -> list[Request]:
        """Preempts and returns all running requests, because the pool and the workers are lost."""
        victims = self._running_scheduler.preempt_all()
        if self.transfers is not None:
            self.transfers.forget()
        self._release(self.queues.kv_waiting)
        for request in self.queues:
            request.forget_blocks()
        self.kv_cache_manager.forget()
        if self.retention is not None:
            self.retention.forget()
        self.encoder_cache.reset()
        self.rows.removed = []
        self.steps.forget()
        return victims

    async def flush(self) -> None:
        """Frees all blocks that the policy keeps for ended requests. Sends the pending operations
        to the pool now, and not with the next step.
        """
        if self.retention is not None:
            self.retention.release_all()
        await self.kv_cache_manager.flush()

    async def reset_prefix_cache(self) -> bool:
        """Removes all cached prefixes. If requests use blocks, removes none and returns False."""
        if self.retention is not None:
            self.retention.release_all()
        return await self.kv_cache_manager.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Marks all encoder outputs as not cached. Sends nothing to the workers."""
        self.encoder_cache.reset()

    def _make_room(self) -> bool:
        """Frees blocks that are kept for an ended request. Returns False if none are kept."""
        return self.retention is not None and self.retention.make_room()

    def _release(self, waiting: Iterable[Request]) -> None:
        """Frees the blocks of waiting requests, whose tokens must then be computed again."""
        released = list(waiting)
        self.queues.release(released)
        for request in reversed(released):
            self.free(request)

    def _new_builder(self) -> StepBuilder:
        config = self.config
        return StepBuilder(
            SchedulerOutput(self.steps.next_number),
            config.token_budget,
            self._long_prefill_token_threshold() if config.long_prefill_token_threshold else 0,
            lambda: PassingOver(config.max_loras, self.running, self.steps.last_updated),
            lambda: StepEncoder(config, self.encoder_cache, config.encoder_compute_budget),
        )

    def _long_prefill_token_threshold(self) -> int:
        """Limit on the tokens of each request in the step. With one request it is 0 (no limit)."""
        config, queues = self.config, self.queues
        num_requests = len(self.running) + len(queues.kv_waiting) + len(queues.waiting)
        if num_requests <= 1:
            return 0
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
        return threshold

    def _finish_step(
        self, builder: StepBuilder, wait_reason: WaitReason | None, *, computes: bool = True
    ) -> SchedulerOutput:
        """Completes the plan. If `computes` is true, counts the step's tokens as computed."""
        plan = builder.plan
        plan.wait_reason = wait_reason
        plan.num_tokens = self.config.token_budget - builder.token_budget
        if removed_rows := self.rows.removed:
            plan.removed_rows, self.rows.removed = removed_rows, []
        if block_ids := self.kv_cache_manager.block_ids_to_zero:
            if self.config.fences_frees:
                block_ids = _held_in(plan, block_ids)
            plan.block_ids_to_zero, self.kv_cache_manager.block_ids_to_zero = block_ids, []
        if self.encoder_cache.evicted:
            plan.evicted_encoder_inputs = self.encoder_cache.take_evicted()
        if builder.failed:
            self.failed |= builder.failed
        if computes:
            self._running_scheduler.update_after_schedule(builder, self.steps)
        self.steps.add(plan)
        if self.transfers is not None:
            self.transfers.planned(plan)
        return plan


def _held_in(plan: SchedulerOutput, blocks: Iterable[BlockId]) -> list[BlockId]:
    """The `blocks` that requests of the step hold. The step must not zero blocks of a request that
    was preempted, because a KV transfer, which is not ordered with steps, may be filling them.
    """
    tables = chain.from_iterable((*plan.block_tables.values(), *plan.appended_blocks.values()))
    held = set(chain.from_iterable(tables))
    return [block for block in blocks if block in held]
