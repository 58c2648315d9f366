"""Replays a step log: repeats its calls, and compares the scheduler's decisions with the log."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from services.cli.replay.entry_parts import (
    read_digest,
    read_grammar,
    read_items,
    read_observed,
    read_output,
    read_program,
    read_sampling,
    read_tenant,
)
from services.cli.replay.fields import Field
from services.cli.replay.history import Abort, EndTurn, Event, GrammarCompiled, History, NextChunk
from services.cli.replay.log_file import Header
from services.cli.replay.logged_transfers import LoggedAnswers, read_transfers
from services.cli.replay.scheduler_run import SchedulerRun
from services.cli.replay.step_records import Write
from services.common.pool.ids import ContextId, RequestKey
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import WaitReason
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.scheduler.options.listed import TRANSFERS
from services.simulation.inprocess_pool import InProcessPool

_ABSENT = object()
_CALLS = (
    *(
        "add",
        "add_chunk",
        "end_turn",
        "grammar_compiled",
        "abort",
        "pause",
        "resume",
        "schedule",
        "update_from_output",
        "preempt_all",
        "end_failed",
    ),
    *("forget_pool", "admit_only", "flush", "reset_prefix_cache", "end"),
    "reset_encoder_cache",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A field whose replayed value differs from the logged value."""

    step: int
    field: str
    logged: Any
    replayed: Any


class LogReplay(SchedulerRun):
    """Replays the entries of a log in order, and stores the history for a what-if run."""

    def __init__(self, header: Header, write: Write | None = None) -> None:
        self._recorded: list[Entry] = []
        self._now = 0.0
        """The clock's time in the last entry that has a time."""
        pool = InProcessPool(header.config)
        self._answers = LoggedAnswers() if header.config.kv_role else None
        connect = None if self._answers is None else TRANSFERS.replaying(self._answers)
        scheduler = RecordingScheduler(
            header.config, pool, self._recorded.append, connect, lambda: self._now
        )
        super().__init__(scheduler, pool, write)
        self.history = History()
        self.requests = self.history.requests
        self.is_complete = False
        """Whether the log's entry `end` was read."""

    async def replay_entry(self, entry: Field) -> list[Difference]:
        """Repeats the call of an entry. Returns the fields whose values differ from the log. No
        entry can be replayed after a difference. Raises FieldError for an entry that is impossible
        at its position.
        """
        if self.is_complete:
            raise entry["call"].wrong("must not follow the end")
        call = entry["call"].one_of(_CALLS)
        if call == "end":
            self.is_complete = True
            return []
        if "now" in entry.members():
            self._now = entry["now"].number(-1e18, 1e18)
        if "lost_after" in entry.members():
            self.pool.num_answers_left = entry["lost_after"].integer()
        if self._answers is not None:
            self._answers.read(entry)
        with suppress(PoolLost):
            await self._call(call, entry)
        self.pool.num_answers_left = None
        replayed = self._recorded.pop()
        return _compare(replayed.get("step", self.history.num_plans), entry.members(), replayed)

    async def _call(self, call: str, entry: Field) -> None:
        match call:
            case "end_failed":
                self.scheduler.end_failed()
            case "pause":
                await self._apply(entry["mode"].member(PauseMode))
            case "admit_only" if entry["keys"].value is None:
                self.scheduler.admit_only(None)
            case "admit_only":
                self.scheduler.admit_only(list(map(self._unfinished, entry["keys"].items())))
            case "flush":
                await self.scheduler.flush()
            case "schedule":
                throttled = entry.get("throttle_prefills", False).boolean()
                observed = read_observed(entry)
                for step in observed:
                    self.scheduler.step_costs.observe(*step)
                self._note_preparations(entry)
                plan = await self.schedule(self.history.num_plans, throttled=throttled)
                self.in_flight[plan.step] = plan
                now = self._now if "now" in entry.members() else None
                self.history.add_plan(plan, throttled=throttled, now=now, observed=observed)
            case "update_from_output":
                self._update_from_output(entry)
            case "end_turn":
                self._end_turn(entry)
            case _:
                await self._apply(self._read_event(call, entry))

    def _read_event(self, call: str, entry: Field) -> Event:
        """The event of a call. If the call concerns no single request, the event is its name."""
        match call:
            case "add":
                return self._read_request(entry)
            case "add_chunk":
                return NextChunk(self._unfinished(entry["key"]).key, self._read_chunk(entry))
            case "abort":
                reason = entry["reason"].member(FinishReason)
                return Abort(self._unfinished(entry["key"]).key, reason)
            case "grammar_compiled":
                key = self._unfinished(entry["key"]).key
                reason = entry.get("reason", FinishReason.ERROR.value).member(FinishReason)
                return GrammarCompiled(key, entry["error"].text(), reason)
        return call

    async def _apply(self, event: Event) -> None:
        self.history.add(event)
        await self.apply(event, self.history.num_plans)

    def _update_from_output(self, entry: Field) -> None:
        step = entry["step"]
        plan = self.in_flight.get(step.integer())
        if plan is None:
            raise step.wrong("must be a step in flight")
        output = read_output(entry, len(plan.requests))
        if self._answers is not None:
            transfers = read_transfers(entry, self.scheduler.config.num_blocks)
            output = replace(output, kv_transfers=transfers)
        for number in [number for number in self.in_flight if number <= plan.step]:
            del self.in_flight[number]
        update = self.scheduler.update_from_output(plan, output)
        self.statistics.updated(update)
        self.history.add_update(update, output.draft_token_ids)

    def _note_preparations(self, entry: Field) -> None:
        """Sets requests' `awaits_adapter` from the wait reasons in a plan's entry, because the log
        has no entry for the end of an adapter's load.
        """
        for name, reason in entry.get("passed_over", {}).members().items():
            request = self.requests.get(RequestKey(int(name))) if name.isdecimal() else None
            if request is not None:
                request.awaits_adapter = reason == WaitReason.ADAPTERS.value

    def _end_turn(self, entry: Field) -> None:
        context = ContextId(entry["context"].integer(1))
        tool, ends = entry["tool"].text(), entry["ends"].boolean()
        self.scheduler.end_turn(context, tool, ends=ends)
        ended = (one.key for one in reversed(self.requests.values()) if one.context == context)
        if (key := next(ended, None)) is not None:
            self.history.add(EndTurn(key, tool, ends))

    def _unfinished(self, key: Field) -> Request:
        request = self.requests.get(RequestKey(key.integer()))
        if request is None or request.is_finished:
            raise key.wrong("must be of a request that has not ended")
        return request

    def _read_request(self, entry: Field) -> Request:
        key, tokens = RequestKey(entry["key"].integer(1)), entry["tokens"]
        if key in self.requests:
            raise entry["key"].wrong("must be new")
        token_ids, config = tokens.integers(), self.scheduler.config
        if not 0 < len(token_ids) <= config.max_prompt_len:
            raise tokens.wrong(f"must hold 1 to {config.max_prompt_len} tokens")
        num_prompt_tokens = entry["num_prompt_tokens"].integer(1, len(token_ids))
        max_tokens = None
        if not config.pooling:
            max_tokens = entry["max_tokens"].integer(len(token_ids) - num_prompt_tokens + 1)
        return Request(
            request_id=entry["id"].text(),
            key=key,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            sampling=read_sampling(entry, max_tokens),
            priority=entry["priority"].integer(-(2**31)),
            arrival_time=entry["arrival_time"].number(-1e18, 1e18),
            cache_salt=entry["cache_salt"].text(),
            reads_prefix_cache=entry["reads_prefix_cache"].boolean(),
            adapter_digest=read_digest(entry.get("adapter", "")),
            resumable=entry.get("resumable", False).boolean(),
            grammar=read_grammar(entry),
            program=read_program(entry),
            tenant=read_tenant(entry.get("tenant", "")),
            tenant_weight=entry.get("tenant_weight", 1.0).number(1e-38, 1e38),
            tenant_max_retained_share=entry.get("tenant_max_retained_share", 1.0).number(0, 1),
            encoder_inputs=read_items(entry.get("encoder_inputs", []), len(token_ids)),
        )

    def _read_chunk(self, entry: Field) -> InputChunk | None:
        if "tokens" not in entry.members():
            return None
        token_ids = entry["tokens"].integers()
        if not token_ids:
            raise entry["tokens"].wrong("must hold tokens")
        sampling = read_sampling(entry, entry["max_tokens"].integer(1))
        arrival_time = entry["arrival_time"].number(-1e18, 1e18)
        return InputChunk(tuple(token_ids), sampling, arrival_time)


def _compare(step: int, logged: Entry, replayed: Entry) -> list[Difference]:
    return [
        Difference(step, name, logged.get(name), replayed.get(name))
        for name in dict.fromkeys([*logged, *replayed])
        if logged.get(name, _ABSENT) != replayed.get(name, _ABSENT)
    ]
