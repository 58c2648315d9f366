"""The calls of a scheduler and its decisions, as entries of the step log.

An entry is a JSON object: `call` is the method that was called, the rest are its arguments and its
results. A scheduler is a deterministic function of its calls, so a log that holds all of them, in
order, can be replayed.

    add                  the request: key, id, tokens (prompt, earlier output), num_prompt_tokens,
                         max_tokens, eos_token_ids, stop_token_ids, repetition_detection (longest
                         and shortest pattern, count), min_tokens, priority, arrival_time,
                         cache_salt, reads_prefix_cache; adapter (SHA-256 of its files, in
                         hexadecimal) and grammar (compiling, ready or failed) if it has one;
                         encoder_inputs, if it has any (identifier, offset, length, embeds or
                         null); resumable, if it is a session
    grammar_compiled     key, error (why it cannot be compiled; empty if it is)
    add_chunk            key of a session, and its next input: tokens, arrival_time, how the turn
                         ends, as in `add`; without these, the end of the session
    pause                mode: keep or abort the requests, and no step until resume, or wait
    resume
    abort                key, reason
    schedule             the plan: step, keys in scheduling order with num_scheduled_tokens and
                         num_computed_tokens before the step, new, resumed, preemptions (victim,
                         cause, tokens lost), block_tables and appended_blocks and draft_token_ids
                         by key, copies (group, source, target), wait_reason (why no waiting
                         request was admitted),
                         passed_over (reasons of single requests by key, if there are any),
                         loads (key, tokens, whether between steps; if any begin),
                         encoder_inputs (by key) and evicted_encoder_inputs, if there are any,
                         throttle_prefills, if the caller let prompts wait,
                         removed_rows; then num_running, num_waiting and num_free_blocks
    update_from_output   step, and parallel to its keys token_ids and draft_token_ids; nan_requests
                         and not_taken (what was appended instead; null: nothing) by index;
                         refused_tokens (the first token that the grammar refuses, by index, if
                         there are any); ended (key, reason, stop token); turns, if any of sessions
                         ended, likewise; pooled, if there are any: indexes of the requests whose
                         prompt was pooled; kv_transfers, if there are any: finished_recving,
                         finished_sending and failed_recving (keys), invalid_block_ids
    preempt_all          preempted
    forget_pool          preempted
    end_failed           ended (as above), where no step was in flight
    admit_only           keys: all other requests are held back; null: none
    flush                num_free_blocks
    reset_prefix_cache   done
    reset_encoder_cache
    end                  the last entry; a log without it was cut short

An entry of a call that asked a connector has its answers, in order, as `connector`: what can be
loaded of a request (null: not known yet; or tokens, and whether between steps), whether blocks of
one that ended are still read, whether blocks will be free when transfers end.

Requests are given by their key, a block table as a list of block ids for each group. Those of the
aborts and the flush that a pause makes follow its entry. A reset that preempts is preempt_all and
reset_prefix_cache. VERSION grows with every change after which an older log cannot be read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from enum import Enum
from itertools import starmap
from typing import Any

from services.common.encoder_input import EncoderInput
from services.common.finish_reason import FinishReason
from services.common.kv_cache_groups import KVCacheGroup
from services.common.pause_mode import PauseMode
from services.common.pool_operations import BlockTables, Operation, Outcome
from services.common.repetition import RepetitionDetection
from services.common.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.connector_answers import RecordedConnector
from services.scheduler.core.kv_connector import KVConnector, KVTransferResults
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    WaitReason,
)
from services.scheduler.core.ports import KVPool, PoolLost
from services.scheduler.core.request import InputChunk, Request, TurnEnd
from services.scheduler.core.scheduler import Scheduler

SCHEMA = "stepwell.step_log"
VERSION = 4

Entry = dict[str, Any]
"""Of JSON's types: equal to itself after it was written as JSON and read again."""


def config_entry(config: SchedulerConfig) -> Entry:
    """A configuration without its fingerprint and its groups, which the header holds beside it."""
    values = {name.name: getattr(config, name.name) for name in fields(config)}
    del values["fingerprint"], values["groups"]
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }


def group_entry(group: KVCacheGroup) -> Entry:
    """A group of layers, as the header lists them."""
    return {
        name: value.value if isinstance(value, Enum) else value
        for name, value in asdict(group).items()
    }


class RecordingScheduler(Scheduler):
    """A scheduler that passes an entry of every call to `record`, after the call is done.

    Entries of `add` and `admit_only` are passed before they change anything. The entry of a call
    that failed because the pool was lost has `lost_after`: the number of transactions that the pool
    had answered in the call. An entry has `connector` if the call asked a connector anything.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: KVPool,
        record: Callable[[Entry], None],
        connector: KVConnector | None = None,
    ) -> None:
        self._answers = _CountedAnswers(pool)
        self._asked = None if connector is None else RecordedConnector(connector)
        super().__init__(config, self._answers, self._asked)
        self._pass_entry = record

    def _record(self, entry: Entry) -> None:
        if self._asked is not None and (answers := self._asked.take_answers()):
            entry["connector"] = answers
        self._pass_entry(entry)

    def add(self, request: Request) -> None:
        self._record(
            _given({"adapter": request.adapter_digest.hex(), "grammar": _grammar(request)})
            | _given({"encoder_inputs": [_item(item) for item in request.encoder_inputs]})
            | {
                "call": "add",
                "key": request.key,
                "id": request.request_id,
                "tokens": list(request.token_ids),
                "num_prompt_tokens": request.num_prompt_tokens,
                **_sampling(request.sampling),
                "priority": request.priority,
                "arrival_time": request.arrival_time,
                "cache_salt": request.cache_salt,
                "reads_prefix_cache": request.reads_prefix_cache,
            }
            | ({"resumable": True} if request.resumable else {})
        )
        super().add(request)

    def add_chunk(self, session: Request, chunk: InputChunk | None) -> None:
        entry: Entry = {"call": "add_chunk", "key": session.key}
        if chunk is not None:
            entry |= {
                "tokens": list(chunk.token_ids),
                "arrival_time": chunk.arrival_time,
                **_sampling(chunk.sampling),
            }
        super().add_chunk(session, chunk)
        self._record(entry)

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        if not request.is_finished:
            super().abort(request, reason)
            self._record({"call": "abort", "key": request.key, "reason": reason.value})

    def grammar_compiled(self, request: Request, error: str = "") -> None:
        if not request.is_finished:
            self._record({"call": "grammar_compiled", "key": request.key, "error": error})
        super().grammar_compiled(request, error)

    def pause(self, mode: PauseMode) -> None:
        self._record({"call": "pause", "mode": mode.value})
        super().pause(mode)

    def resume(self) -> None:
        self._record({"call": "resume"})
        super().resume()

    async def schedule(
        self, traceparent: str = "", *, throttle_prefills: bool = False
    ) -> SchedulerOutput:
        with self._noting_loss("schedule"):
            plan = await super().schedule(traceparent, throttle_prefills=throttle_prefills)
        self._record(
            _given(
                {
                    "passed_over": _reasons(plan.passed_over),
                    "loads": _loads(plan),
                    "encoder_inputs": _by_key(plan.encoder_inputs),
                    "evicted_encoder_inputs": list(plan.evicted_encoder_inputs),
                    "throttle_prefills": throttle_prefills,
                }
            )
            | {
                "call": "schedule",
                "step": plan.step,
                "keys": _keys(plan.requests),
                "num_scheduled_tokens": list(plan.num_scheduled_tokens),
                "num_computed_tokens": list(plan.num_computed_tokens),
                "new": _keys(plan.new),
                "resumed": _keys(plan.resumed),
                "preemptions": [
                    [preemption.victim.key, preemption.cause.key, preemption.num_lost_tokens]
                    for preemption in plan.preemptions
                ],
                "block_tables": _tables(plan.block_tables),
                "appended_blocks": _tables(plan.appended_blocks),
                "copies": [[copy.group, copy.source, copy.target] for copy in plan.copies],
                "draft_token_ids": {
                    str(request.key): list(drafts)
                    for request, drafts in plan.draft_token_ids.items()
                },
                "wait_reason": plan.wait_reason and plan.wait_reason.value,
                "removed_rows": list(plan.removed_rows),
                "num_running": len(self.running),
                "num_waiting": self.num_waiting,
                "num_free_blocks": self.num_free_blocks,
            }
        )
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        update = super().update_from_output(plan, output)
        refused = {str(index): first for index, first in output.refused_tokens.items()}
        self._record(
            _given({"refused_tokens": refused, "kv_transfers": _transfers(output.kv_transfers)})
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
                "ended": [_end(request, request) for request in update.ended],
            }
            | ({"turns": list(starmap(_end, update.turns.items()))} if update.turns else {})
            | ({"pooled": sorted(output.pooled)} if output.pooled else {})
        )
        return update

    def preempt_all(self) -> list[Request]:
        victims = super().preempt_all()
        self._record({"call": "preempt_all", "preempted": _keys(victims)})
        return victims

    def forget_pool(self) -> list[Request]:
        victims = super().forget_pool()
        self._record({"call": "forget_pool", "preempted": _keys(victims)})
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
            ends = [_end(request, request) for request in failed]
            self._record({"call": "end_failed", "ended": ends})
        return failed

    async def flush(self) -> None:
        with self._noting_loss("flush"):
            await super().flush()
        self._record({"call": "flush", "num_free_blocks": self.num_free_blocks})

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


class _CountedAnswers:
    """A pool that counts the transactions it answered."""

    def __init__(self, pool: KVPool) -> None:
        self.count = 0
        self._pool = pool

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        outcome = await self._pool.transact(operations, traceparent)
        self.count += 1
        return outcome


def _sampling(sampling: SamplingParams) -> Entry:
    return {
        "max_tokens": sampling.max_tokens,
        "eos_token_ids": sorted(set(sampling.eos_token_ids)),
        "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        "repetition_detection": _repetition(sampling.repetition_detection),
        "min_tokens": sampling.min_tokens,
    }


def _repetition(repetition: RepetitionDetection | None) -> list[int] | None:
    if repetition is None:
        return None
    return [repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count]


def _given(entry: Entry) -> Entry:
    """An entry without what is empty: fields that most requests and steps do not have."""
    return {name: value for name, value in entry.items() if value}


def _by_key(lists: dict[Request, list[int]]) -> dict[str, list[int]]:
    return {str(request.key): list(values) for request, values in lists.items()}


def _item(item: EncoderInput) -> list[str | int | list[int] | None]:
    embeds = None if item.embeds is None else list(item.embeds)
    return [item.identifier, item.offset, item.length, embeds]


def _grammar(request: Request) -> str | None:
    return request.grammar and request.grammar.value


def _reasons(passed_over: Mapping[Request, WaitReason]) -> dict[str, str]:
    return {str(request.key): reason.value for request, reason in passed_over.items()}


def _loads(plan: SchedulerOutput) -> list[list[int | bool]]:
    return [[load.request.key, load.num_tokens, load.is_async] for load in plan.loads]


def _transfers(results: KVTransferResults) -> Entry:
    return _given(
        {
            "finished_recving": list(results.finished_recving),
            "finished_sending": list(results.finished_sending),
            "failed_recving": sorted(results.failed_recving),
            "invalid_block_ids": sorted(results.invalid_block_ids),
        }
    )


def _keys(requests: Sequence[Request]) -> list[int]:
    return [request.key for request in requests]


def _tables(tables: dict[Request, BlockTables]) -> dict[str, list[list[int]]]:
    return {
        str(request.key): [list(blocks) for blocks in groups] for request, groups in tables.items()
    }


def _end(request: Request, end: Request | TurnEnd) -> list[int | str | None]:
    reason = end.finish_reason
    return [request.key, reason and reason.value, end.stop_token_id]
