"""Replays a step log: makes the same calls, and compares what the scheduler decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.replay.fields import Field
from services.cli.replay.history import History, new_request, read_arrival
from services.cli.replay.inprocess_pool import InProcessPool
from services.cli.replay.log_file import Header
from services.cli.replay.statistics import RunStatistics
from services.common.finish_reason import FinishReason
from services.common.pool_operations import Operation, Outcome
from services.scheduler.core import ports
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.recorder import Entry, RecordingScheduler
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import PauseMode

_ABSENT = object()


class LosablePool:
    """An in-process pool that can be lost, and opened again, empty."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.num_answers_left: int | None = None
        """Transactions that it answers before it is lost; None if it is not to be lost."""
        self.reopen()

    def reopen(self) -> None:
        """Begins a new life."""
        self.num_answers_left = None
        self._pool = InProcessPool(
            self._config.num_blocks,
            self._config.block_size,
            enable_prefix_caching=self._config.enable_prefix_caching,
            groups=self._config.groups,
            drop_last_hit_block=self._config.drop_last_hit_block,
        )

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        """See `ports.KVPool`."""
        if self.num_answers_left is not None:
            if self.num_answers_left == 0:
                raise ports.PoolLost("the pool was lost here")
            self.num_answers_left -= 1
        return await self._pool.transact(operations, traceparent)


@dataclass(frozen=True, slots=True)
class Difference:
    """A field whose value differs from the logged one."""

    step: int
    field: str
    logged: Any
    replayed: Any


class LogReplay:
    """Replays the entries of a log in order, and keeps what a what-if needs."""

    def __init__(self, header: Header) -> None:
        self._pool = LosablePool(header.config)
        self._recorded: list[Entry] = []
        self.scheduler = RecordingScheduler(header.config, self._pool, self._recorded.append)
        self.statistics = RunStatistics(self.scheduler)
        self.history = History()
        self.is_complete = False
        """Whether the entry `end` was read."""
        self._in_flight: dict[int, SchedulerOutput] = {}

    async def replay_entry(self, entry: Field) -> list[Difference]:
        """Makes the call of an entry; returns the fields that differ.

        After a difference no further entry can be replayed. Raises FieldError for an entry that is
        not possible here.
        """
        if self.is_complete:
            raise entry["call"].wrong("must not follow the end")
        call = entry["call"].one_of(_CALLS)
        if call == "end":
            self.is_complete = True
            return []
        await _CALLS[call](self, entry)
        replayed = self._recorded.pop()
        return _compare(replayed.get("step", self.history.num_plans), entry.members(), replayed)

    async def _add(self, entry: Field) -> None:
        arrival = read_arrival(entry, self.scheduler.config.max_model_len)
        if arrival.key in self.history.requests:
            raise entry["key"].wrong("must be new")
        request = new_request(arrival)
        self.statistics.arrived(request, self.history.num_plans)
        self.history.add_arrival(arrival, request)
        self.scheduler.add(request)

    async def _abort(self, entry: Field) -> None:
        request = self._request(entry["key"])
        reason = FinishReason(entry["reason"].one_of([reason.value for reason in FinishReason]))
        self.history.add_abort(request, reason)
        self.scheduler.abort(request, reason)

    async def _pause(self, entry: Field) -> None:
        self.scheduler.pause(PauseMode(entry["mode"].one_of([mode.value for mode in PauseMode])))

    async def _resume(self, entry: Field) -> None:  # noqa: ARG002 - the call has no arguments
        self.scheduler.resume()

    async def _schedule(self, entry: Field) -> None:
        plan = await self._with_loss(entry, self.scheduler.schedule)
        if plan is not None:
            self.statistics.planned(plan, self.history.num_plans)
            self._in_flight[plan.step] = plan
            self.history.add_plan()

    async def _update_from_output(self, entry: Field) -> None:
        step = entry["step"]
        plan = self._in_flight.get(step.integer())
        if plan is None:
            raise step.wrong("must be a step in flight")
        output = _read_output(entry, len(plan.requests))
        self._in_flight = {
            number: later for number, later in self._in_flight.items() if number > plan.step
        }
        update = self.scheduler.update_from_output(plan, output)
        self.statistics.updated(update)
        self.history.add_update(update)

    async def _preempt_all(self, entry: Field) -> None:  # noqa: ARG002 - the call has no arguments
        self.history.add_call("preempt_all")
        self.scheduler.preempt_all()
        self.statistics.preempted()

    async def _forget_pool(self, entry: Field) -> None:  # noqa: ARG002 - the call has no arguments
        self.history.add_call("forget_pool")
        self._in_flight.clear()
        self.scheduler.forget_pool()
        self.statistics.preempted()
        self._pool.reopen()

    async def _admit_only(self, entry: Field) -> None:
        keys = entry["keys"]
        if keys.value is None:
            self.scheduler.admit_only(None)
        else:
            self.scheduler.admit_only([self._request(key) for key in keys.items()])

    async def _flush(self, entry: Field) -> None:
        await self._with_loss(entry, self.scheduler.flush)

    async def _reset_prefix_cache(self, entry: Field) -> None:
        self.history.add_call("reset_prefix_cache")
        await self._with_loss(entry, self.scheduler.reset_prefix_cache)

    async def _with_loss(self, entry: Field, call: Callable[[], Any]) -> Any:
        """Calls, with a pool that is lost where the log says so; returns None then."""
        if "lost_after" in entry.members():
            self._pool.num_answers_left = entry["lost_after"].integer()
        try:
            return await call()
        except ports.PoolLost:
            return None
        finally:
            self._pool.num_answers_left = None

    def _request(self, key: Field) -> Request:
        request = self.history.requests.get(key.integer())
        if request is None or request.is_finished:
            raise key.wrong("must be of a request that has not ended")
        return request


_CALLS: dict[str, Any] = {
    "add": LogReplay._add,
    "abort": LogReplay._abort,
    "pause": LogReplay._pause,
    "resume": LogReplay._resume,
    "schedule": LogReplay._schedule,
    "update_from_output": LogReplay._update_from_output,
    "preempt_all": LogReplay._preempt_all,
    "forget_pool": LogReplay._forget_pool,
    "admit_only": LogReplay._admit_only,
    "flush": LogReplay._flush,
    "reset_prefix_cache": LogReplay._reset_prefix_cache,
    "end": None,
}


def _read_output(entry: Field, num_requests: int) -> ModelRunnerOutput:
    tokens, drafts = entry["token_ids"], entry["draft_token_ids"]
    token_ids = [item.integers() for item in tokens.items()]
    if len(token_ids) != num_requests:
        raise tokens.wrong(f"must list tokens of {num_requests} requests")
    draft_token_ids = [item.integers(-1) for item in drafts.items()]
    if len(draft_token_ids) not in (0, num_requests):
        raise drafts.wrong(f"must list drafts of {num_requests} requests, or nothing")
    nan = entry["nan_requests"].integers(0, num_requests - 1)
    return ModelRunnerOutput(
        token_ids, draft_token_ids=draft_token_ids, nan_requests=frozenset(nan)
    )


def _compare(step: int, logged: Entry, replayed: Entry) -> list[Difference]:
    names = dict.fromkeys([*logged, *replayed])
    return [
        Difference(step, name, logged.get(name), replayed.get(name))
        for name in names
        if logged.get(name, _ABSENT) != replayed.get(name, _ABSENT)
    ]
