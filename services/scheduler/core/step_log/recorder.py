"""Records a scheduler's calls and decisions in a step log. `log_entry` describes the entries."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap

from services.common.pool.ids import ContextId
from services.common.pool.operations import Operation, Outcome
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.replica_state import Connect
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import KVPool, PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_costs import ObservedStep
from services.scheduler.core.step_log.log_entry import (
    TIMED_VERSION,
    VERSION,
    Entry,
    by_key,
    end_entry,
    grammar_entry,
    item_entry,
    keys_of,
    loads_entry,
    program_entry,
    reasons_entry,
    sampling_entry,
    tables_entry,
    transfers_entry,
    without_empty,
)
from services.scheduler.core.step_log.logged_times import CallClock, NotedCosts


class RecordingScheduler(Scheduler):
    """A scheduler that calls `record` with an entry for each call of its methods.

    If a call fails because the pool was lost, its entry has the field `lost_after`: the number of
    transactions that the pool executed during the call. If a KV connector was queried, the entry
    has the field `connector`. If the policy read the clock, which stands still during a call, the
    entry has the field `now`.

    If the policy decides about contexts (KV blocks of ended requests), it receives the durations of
    steps only when the next step is planned, so that the entry of this call can list the durations.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVPool,
        record: Callable[[Entry], None],
        connect: Connect | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._answers = _CountedAnswers(pool)
        self._clock = CallClock(clock)
        super().__init__(config, self._answers, connect, self._clock)
        if self.transfers is not None:
            self.transfers.record_answers()
        self._pass_entry = record
        self._observed: list[ObservedStep] = []
        """Steps whose durations the policy received in the present call."""
        self._policy_costs = self.step_costs
        self._noted_costs = None if self.retention is None else NotedCosts()
        if self._noted_costs is not None:
            self.step_costs = self._noted_costs

    @property
    def log_version(self) -> int:
        return VERSION if self.retention is None else TIMED_VERSION

    def _record(self, entry: Entry) -> None:
        if self.transfers is not None and (answers := self.transfers.take_answers()):
            entry["connector"] = answers
        if self._observed:
            entry["observed_steps"] = list(map(list, self._observed))
            self._observed = []
        if (now := self._clock.take()) is not None:
            entry["now"] = now
        self._pass_entry(entry)

    def _pass_times(self) -> None:
        """Passes the durations of steps to the policy, and reads the clock for the entry."""
        if self._noted_costs is not None:
            self._observed = self._noted_costs.take()
            for observed in self._observed:
                self._policy_costs.observe(*observed)
            self._clock()

    def add(self, request: Request) -> None:
        entry = (
            without_empty(
                {"adapter": request.adapter_digest.hex(), "grammar": grammar_entry(request)}
            )
            | without_empty(
                {"encoder_inputs": [item_entry(item) for item in request.encoder_inputs]}
            )
            | {
                "call": "add",
                "key": request.key,
                "id": request.request_id,
                "tokens": list(request.token_ids),
                "num_prompt_tokens": request.num_prompt_tokens,
                **sampling_entry(request.sampling),
                "priority": request.priority,
                "arrival_time": request.arrival_time,
                "cache_salt": request.cache_salt,
                "reads_prefix_cache": request.reads_prefix_cache,
            }
            | ({"resumable": True} if request.resumable else {})
            | ({} if self.retention is None else program_entry(request))
        )
        super().add(request)
        self._record(entry)

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        entry: Entry = {"call": "add_chunk", "key": session.key}
        if chunk is not None:
            entry |= {
                "tokens": list(chunk.token_ids),
                "arrival_time": chunk.arrival_time,
                **sampling_entry(chunk.sampling),
            }
        super().add_chunk(session, chunk)
        self._record(entry)

    def end_turn(self, context: ContextId, tool: str, *, ends: bool = False) -> None:
        super().end_turn(context, tool, ends=ends)
        if self.retention is not None:
            self._record({"call": "end_turn", "context": context, "tool": tool, "ends": ends})

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        if not request.is_finished:
            super().abort(request, reason)
            self._record({"call": "abort", "key": request.key, "reason": reason.value})

    def grammar_compiled(
        self, request: Request, error: str = "", reason: FinishReason = FinishReason.ERROR
    ) -> None:
        if not request.is_finished:
            entry = {"call": "grammar_compiled", "key": request.key, "error": error}
            self._record(entry | ({"reason": reason.value} if error else {}))
        super().grammar_compiled(request, error, reason)

    def pause(self, mode: PauseMode) -> None:
        self._record({"call": "pause", "mode": mode.value})
        super().pause(mode)

    def resume(self) -> None:
        self._record({"call": "resume"})
        super().resume()

    async def schedule(
        self, traceparent: str = "", *, throttle_prefills: bool = False
    ) -> SchedulerOutput:
        self._pass_times()
        with self._noting_loss("schedule"):
            plan = await super().schedule(traceparent, throttle_prefills=throttle_prefills)
        self._record(
            without_empty(
                {
                    "passed_over": reasons_entry(plan.passed_over),
                    "loads": loads_entry(plan),
                    "encoder_inputs": by_key(plan.encoder_inputs),
                    "evicted_encoder_inputs": list(plan.evicted_encoder_inputs),
                    "throttle_prefills": throttle_prefills,
                }
            )
            | {
                "call": "schedule",
                "step": plan.step,
                "keys": keys_of(plan.requests),
                "num_scheduled_tokens": list(plan.num_scheduled_tokens),
                "num_computed_tokens": list(plan.num_computed_tokens),
                "new": keys_of(plan.new),
                "resumed": keys_of(plan.resumed),
                "preemptions": [
                    [preemption.victim.key, preemption.cause.key, preemption.num_lost_tokens]
                    for preemption in plan.preemptions
                ],
                "block_tables": tables_entry(plan.block_tables),
                "appended_blocks": tables_entry(plan.appended_blocks),
                "copies": [[copy.group, copy.source, copy.target] for copy in plan.copies],
                "draft_token_ids": {
                    str(request.key): list(drafts)
                    for request, drafts in plan.draft_token_ids.items()
                },
                "wait_reason": plan.wait_reason and plan.wait_reason.value,
                "removed_rows": list(plan.removed_rows),
                "num_running": len(self.running),
                "num_waiting": len(self.queues),
                "num_free_blocks": self.kv_cache_manager.num_free_blocks,
            }
        )
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        update = super().update_from_output(plan, output)
        self._record(
            without_empty(
                {
                    "refused_tokens": _by_index(output.refused_tokens),
                    "grammar_errors": _by_index(output.grammar_errors),
                    "kv_transfers": transfers_entry(output.kv_transfers),
                }
            )
            | {
                "call": "update_from_output",
                "step": plan.step,
                "token_ids": [list(tokens) for tokens in output.token_ids],
                "draft_token_ids": [list(drafts) for drafts in output.draft_token_ids],
                "nan_requests": sorted(output.nan_requests),
                "not_taken": {
                    str(index): None if taken is None else list(taken)
                    for index, (given, taken) in enumerate(
                        zip(output.token_ids, update.token_ids, strict=True)
                    )
                    if taken is not given and (taken is None or list(taken) != list(given))
                },
                "ended": [end_entry(request, request) for request in update.ended],
            }
            | ({"turns": list(starmap(end_entry, update.turns.items()))} if update.turns else {})
            | ({"pooled": sorted(output.pooled)} if output.pooled else {})
        )
        return update

    def preempt_all(self) -> list[Request]:
        victims = super().preempt_all()
        self._record({"call": "preempt_all", "preempted": keys_of(victims)})
        return victims

    def forget_pool(self) -> list[Request]:
        victims = super().forget_pool()
        self._record({"call": "forget_pool", "preempted": keys_of(victims)})
        return victims

    def admit_only(self, requests: Collection[Request] | None) -> None:
        unfinished = [request for request in requests or () if not request.is_finished]
        keys = None if requests is None else sorted(request.key for request in unfinished)
        self._record({"call": "admit_only", "keys": keys})
        super().admit_only(requests)

    def reset_encoder_cache(self) -> None:
        self._record({"call": "reset_encoder_cache"})
        super().reset_encoder_cache()

    def end_failed(self) -> list[Request]:
        failed = super().end_failed()
        if failed:
            ends = [end_entry(request, request) for request in failed]
            self._record({"call": "end_failed", "ended": ends})
        return failed

    async def flush(self) -> None:
        with self._noting_loss("flush"):
            await super().flush()
        self._record({"call": "flush", "num_free_blocks": self.kv_cache_manager.num_free_blocks})

    async def reset_prefix_cache(self) -> bool:
        with self._noting_loss("reset_prefix_cache"):
            done = await super().reset_prefix_cache()
        self._record({"call": "reset_prefix_cache", "done": done})
        return done

    @contextmanager
    def _noting_loss(self, call: str) -> Iterator[None]:
        self._answers.count = 0
        try:
            yield
        except PoolLost:
            self._record({"call": call, "lost_after": self._answers.count})
            raise


def _by_index(values: Mapping[int, int | str]) -> Entry:
    return {str(index): value for index, value in values.items()}


class _CountedAnswers:
    """A pool that passes transactions to another pool, and counts the successful transactions."""

    def __init__(self, pool: KVPool) -> None:
        self.count = 0
        self._pool = pool

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        outcome = await self._pool.transact(operations, traceparent)
        self.count += 1
        return outcome
