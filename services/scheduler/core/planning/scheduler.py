"""The scheduler decides which tokens of which requests each engine step computes."""

from collections.abc import Callable, Collection, Iterable
from itertools import chain, islice

from services.common.pool.ids import BlockId, ContextId
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.replica_state import Connect, ReplicaState
from services.scheduler.core.engine.step_update import StepUpdate
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.planning.prefill_pacing import PrefillPacing
from services.scheduler.core.planning.running_scheduler import RunningScheduler
from services.scheduler.core.planning.step_builder import PassingOver, StepBuilder
from services.scheduler.core.planning.step_encoder import StepEncoder
from services.scheduler.core.planning.waiting_scheduler import LOOKUP_BATCH, WaitingScheduler
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request, RequestStatus


class Scheduler(ReplicaState):
    """Plans the steps of one replica. The base class stores the running and waiting requests. The
    decisions equal the decisions of vLLM V1's scheduler. Blocks are allocated in transactions with
    the pool. Calls must not overlap, so only one engine loop may use a scheduler.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVPool,
        connect: Connect | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`connect` must be set if the configuration has a `kv_role`, and only then. `clock` is in
        seconds, and only for policies that ask for the time. By default time stands still.
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
        """Whether a step would have an effect, such as sending operations to pool or workers."""
        if self.running and self.pause_mode is None:
            return True
        has_operations = bool(self.kv_cache_manager.pending or self.rows.removed)
        return has_operations or self.has_requests or self.has_transfers

    @property
    def only_frees(self) -> bool:
        """Whether a step would only free blocks of ended requests."""
        has_commits = bool(self.kv_cache_manager.pending.commits)
        return not (self.running or self.queues or has_commits or self.has_transfers)

    @property
    def is_steady(self) -> bool:
        """Whether only running requests, and no waiting request or operation, affect a step."""
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
        """Whether a transfer is in progress, whose end a step's output must report."""
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
        """The waiting requests that the next step may try to admit."""
        return islice(self.queues.ready, min(self.num_free_places, LOOKUP_BATCH))

    def add(self, request: Request) -> None:
        if self.config.pooling:
            request.max_num_tokens = request.num_prompt_tokens
        else:
            request.limit_length(self.config.max_model_len)
        self.queues.add(request)
        if self.retention is not None:
            self.retention.arrived(request)

    def end_turn(self, context: ContextId, tool: str, *, ends: bool = False) -> None:
        """Notes which tool runs after the turn that left a context, or that it was the last turn of
        its program. Does nothing without such a context.
        """
        if self.retention is not None:
            self.retention.end_turn(context, tool, ends=ends)

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        """Adds the next input of a session that has not ended. If `chunk` is None, the session
        ends. Between two turns it ends at once, otherwise after the turn that runs or waits.
        """
        if session.status is not RequestStatus.WAITING_FOR_CHUNK:
            session.chunks.append(chunk)
        elif chunk is None:
            session.finish(FinishReason.ABORT)  # the step log has no entry of an abort for it
            self.remove(session)
        else:
            self.queues.begin_turn(session, chunk, self.config.max_model_len)

    def is_held_up_by_sessions(self, plan: SchedulerOutput) -> bool:
        """Whether planning again would result in the same empty step as `plan`, because all
        requests wait for blocks or slots of idle sessions, and no pending operation frees any.
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
        """Records that the workers have compiled the grammar of a request, unless it has ended. If
        compilation failed, the request will end with `error`, which is not empty, and `reason`.
        """
        if request.is_finished:
            return
        request.grammar = GrammarStatus.READY
        if error:
            request.grammar = GrammarStatus.FAILED
            request.error, request.error_reason = error, reason

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, whether it runs or waits. Does nothing if it has ended."""
        if not request.is_finished:
            request.finish(reason)
            self.remove(request)

    def admit_only(self, requests: Collection[Request] | None) -> None:
        """Allows only these requests to be admitted. All others are held back, including requests
        that arrive later. None allows all requests again. No request may run. All requests are
        queued again in the order of arrival. Waiting requests lose their blocks, except while a
        load is filling them.
        """
        if self.running:
            raise AssertionError("requests run that are to be held back")
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._release(one for one in self.queues.kv_waiting if one.status is not loading)
        self.queues.admit_only(requests)

    def pause(self, mode: PauseMode) -> None:
        """Pauses the engine until `resume`. With WAIT, the caller plans steps while requests run,
        which admit no new request. With ABORT, the caller ends all requests.
        """
        self.pause_mode = mode

    def resume(self) -> None:
        """Ends a pause: steps are planned again."""
        self.pause_mode = None

    async def schedule(
        self, traceparent: str = "", *, throttle_prefills: bool = False
    ) -> SchedulerOutput:
        """Plans one step and reserves its memory.

        There is no prefill and no decode phase. Each request has tokens, and a count of how many
        are computed. A step distributes a budget of tokens so that the count catches up:

        1. Running requests are scheduled in the order of admission. Their blocks are allocated in
           one transaction with the pool. If the blocks do not fit, the policy chooses a running
           request to preempt, and the remaining requests are planned again.
        2. If no request was preempted, waiting requests are admitted from the head of the queue,
           each with the cached part of its prompt, until budget, rows or blocks are used up. If the
           head cannot be admitted, admission stops. If the reason concerns the head alone, the head
           is passed over instead. It keeps its position, and the next request is tried.

        With `throttle_prefills`, prompts wait while requests decode, as `PrefillPacing` describes.
        In a pause with a mode other than WAIT the step computes nothing.
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
        """Applies the output of a step. Appends the sampled tokens, also to requests that were
        preempted while the step ran. Discards the tokens of requests that ended meanwhile, and of
        the requests in `plan.dropped`. Ends requests that are complete. A session whose turn is
        complete begins its next turn, or waits for the input of that turn.
        """
        return self._update.update(plan, output)

    def end_failed(self) -> list[Request]:
        """Ends and returns, in order of arrival, the requests that can never run."""
        return self._update.end_failed()

    def preempt_all(self) -> list[Request]:
        """Preempts every running request. Tokens that steps in flight sample for these requests
        will be discarded. The requests are queued in their order of admission.
        """
        self.steps.drop(list(self.running))
        return self._running_scheduler.preempt_all()

    def forget_pool(self) -> list[Request]:
        """Resets the state for an empty pool and empty workers. Returns the preempted requests."""
        victims = self._running_scheduler.preempt_all()
        if self.transfers is not None:
            self.transfers.forget()
        self._release(self.queues.kv_waiting)
        for request in self.queues.waiting:
            request.forget_blocks()
        self.kv_cache_manager.forget()
        if self.retention is not None:
            self.retention.forget()
        self.encoder_cache.reset()
        self.rows.removed = []
        self.steps.forget()
        return victims

    async def flush(self) -> None:
        """Frees the blocks of ended requests, and sends the pending operations to the pool now,
        instead of with the next step.
        """
        if self.retention is not None:
            self.retention.release_all()
        await self.kv_cache_manager.flush()

    async def reset_prefix_cache(self) -> bool:
        """Removes every cached prefix. If requests that have not ended use blocks, no prefix is
        removed, and the result is False.
        """
        if self.retention is not None:
            self.retention.release_all()
        return await self.kv_cache_manager.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Removes all encoder outputs. Sends nothing to the workers."""
        self.encoder_cache.reset()

    def _make_room(self) -> bool:
        """Releases an ended request that is held. Returns False if there is none."""
        return self.retention is not None and self.retention.make_room()

    def _release(self, waiting: Iterable[Request]) -> None:
        """Frees the blocks of waiting requests. Their tokens are computed again."""
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
        """Limit on the tokens of one request in the step. 0, for no limit, if there is only one."""
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
        """Completes the planned step. If `computes` is true, its tokens then count as computed."""
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
    """Those of some blocks that requests of a step hold. A preempted request has lost its blocks.
    The step must not zero them, because a load, which is not ordered with steps, may fill them.
    """
    tables = chain.from_iterable((*plan.block_tables.values(), *plan.appended_blocks.values()))
    held = set(chain.from_iterable(tables))
    return [block for block in blocks if block in held]
