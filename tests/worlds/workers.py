"""The workers of a world (a simulated replica), which compute with a PagedModel. The world decides
when they answer each step.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.cli.replay.what_if import pooled_output
from services.common.pool.ids import RequestKey
from services.common.pool.operations import BlockTables
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.kv_transfer import NO_RESULTS
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import WorkersLost
from services.scheduler.core.request import Request
from tests.scheduler.paged_model import PagedModel, StepWork, StoredTokens, work_of
from tests.worlds.tier import WorldTier
from tests.worlds.world import Arrival, World

if TYPE_CHECKING:
    from tests.scenarios.stand_in_connector import StandInConnector

_Answer = asyncio.Future[ModelRunnerOutput]
_LEAST_SECONDS, _MOST_SECONDS = 0.01, 10.0
_SLACK_SECONDS = 0.005
"""In every second world, the workers report these seconds of slack for each step. The engine then
delays each step, at most until the next tick, in which the previous step ends.
"""


@dataclass(frozen=True, slots=True)
class SentLoad:
    """An order to load, through the KV connector, the keys and values of a sequence's positions
    `begin` to `end` (exclusive), and the recurrent state at `end`. If all tokens are loaded, the
    state is the one before the last token.
    """

    request: RequestKey
    is_async: bool
    stored: StoredTokens
    blocks: BlockTables
    begin: int
    end: int


@dataclass(slots=True)
class SentStep:
    """A step that the engine has sent and the workers have not answered yet."""

    plan: SchedulerOutput
    work: StepWork
    loads: list[SentLoad]
    number: int
    """The number of the step, as the connector counts."""
    answer: _Answer
    void: set[str] = field(default_factory=set)
    """Ids of requests whose blocks an earlier step failed to load. The step was planned before that
    was known, and computes them from wrong data.
    """


class WorldWorkers:
    """An `Executor`. A step runs when it is answered, after all earlier steps.

    Asynchronous loads are not ordered with steps. Some write to the cache as soon as they are sent,
    before the steps in flight run, and others when they end. Loads from the `tier` (host memory)
    begin when their step runs.
    """

    def __init__(
        self, world: World, connector: "StandInConnector | None", tier: WorldTier | None
    ) -> None:
        self.num_tokens = 0
        self._world = world
        self._config = world.config
        self._arrivals = {arrival.name: arrival for arrival in world.arrivals}
        self._grammars = {a.name: a.grammar for a in world.arrivals if a.grammar is not None}
        self._connector = connector
        self._tier = tier
        self._sent: deque[SentStep] = deque()
        self._deadlines = Deadlines(_LEAST_SECONDS, _MOST_SECONDS)
        self._void: dict[int, set[str]] = {}
        """Maps an answered step to the ids of requests whose blocks were not loaded. Until the
        scheduler has processed the answer, it plans further steps of these requests, which compute
        from wrong data.
        """
        self._dropped: dict[int, set[str]] = {}
        """Maps an answered step to the ids of requests whose tokens the scheduler must drop,
        because their blocks had not been computed again after a failed load.
        """
        self._late_loads: dict[RequestKey, SentLoad] = {}
        """Maps requests to their asynchronous loads, which write to the cache when they end."""
        self._items: dict[str, int] = {}
        """Maps the identifier of an item to the number of its stored embeddings."""
        self._is_lost = False
        self.have_ended = False
        """Whether the lost workers have ended, so that new processes replace them."""
        self._last_plan: SchedulerOutput | None = None
        self._stale: set[Request] = set()
        """Requests for which the workers may still have tokens that the scheduler has dropped."""
        self.model = self._new_model()

    @property
    def num_in_flight(self) -> int:
        return len(self._sent)

    @property
    def sent(self) -> list[SchedulerOutput]:
        """The plans of the steps in flight."""
        return [step.plan for step in self._sent]

    async def submit(self, plan: SchedulerOutput, traceparent: str = "") -> _Answer:  # noqa: ARG002
        if self._is_lost:
            raise WorkersLost("the workers are away")
        answer: _Answer = asyncio.get_running_loop().create_future()
        number = self._connector.step if self._connector is not None else 0
        loads = _loads(plan) if self._connector is not None else []
        for load in loads:
            if load.is_async:
                self._begin_load(load)
        work = work_of(plan, self._grammars)
        assert _LEAST_SECONDS <= self._deadlines.seconds(plan.num_tokens) <= _MOST_SECONDS
        void = set().union(*self._void.values())
        self._sent.append(SentStep(plan, work, loads, number, answer, void))
        return answer

    def answer_next(self) -> None:
        """Runs and answers the oldest step in flight, if there is one."""
        while self._sent and self._sent[0].answer.cancelled():
            self._sent.popleft()
        if not self._sent:
            return
        step = self._sent[0]
        if any(map(self._breaks, step.plan.requests, _ends(step.plan))):
            self.lose(have_ended=True)
            return
        output = self._run(step)
        self._sent.popleft()
        step.answer.set_result(output)

    def taken_in(self, plan: SchedulerOutput) -> None:
        """Must be called when the scheduler has processed the answer of a step."""
        self._void.pop(plan.step, None)
        void = self._dropped.pop(plan.step, ())
        kept = set(plan.requests) - plan.dropped
        assert not any(one.request_id in void and not one.is_finished for one in kept)

    def lose(self, *, have_ended: bool) -> None:
        """Raises WorkersLost for every step in flight and every later step."""
        self._is_lost, self.have_ended = True, self.have_ended or have_ended
        for step in self._give_up():
            if not step.answer.done():
                step.answer.set_exception(WorkersLost("the workers are away"))

    def renew(self) -> None:
        """Begins a new generation (as after a loss) with an empty batch and an empty cache. The
        tier's blocks survive unless the worker processes have ended.
        """
        self._give_up()
        if self._tier is not None:
            self._tier.clear() if self.have_ended else self._tier.reset()
        self._is_lost = self.have_ended = False
        self._void.clear()
        self._dropped.clear()
        self._late_loads.clear()
        self._last_plan = None
        self._stale.clear()
        self._deadlines.forget()
        self._items.clear()
        if self._connector is not None:
            self._connector.forget()
        self.model = self._new_model()

    def _give_up(self) -> list[SentStep]:
        """Removes and returns the steps in flight. The oldest may still store its blocks."""
        steps, self._sent = list(self._sent), deque()
        if steps and self._tier is not None and steps[0].plan.step % 2:
            offloaded = steps[0].plan.kv_connector_metadata
            self._tier.store(() if offloaded is None else offloaded.stores, self.model.cache)
        return steps

    def _new_model(self) -> PagedModel:
        config = self._config
        return PagedModel(
            config.block_size, config.max_num_seqs, config.num_speculative_tokens, config.groups
        )

    def _breaks(self, request: Request, end: int) -> bool:
        position = self._arrivals[request.request_id].breaks_workers_at
        return position is not None and end > position

    def _run(self, step: SentStep) -> ModelRunnerOutput:
        plan = step.plan
        self.num_tokens += plan.num_tokens
        self._deadlines.took(plan.num_tokens, plan.num_tokens / 1000)
        offloaded = plan.kv_connector_metadata
        if self._tier is not None and offloaded is not None:
            self._tier.store(offloaded.stores, self.model.cache)
        self.model.cache.zero(step.work.zeroed)  # must precede the loads of this step
        if self._tier is not None and offloaded is not None:
            self._tier.begin_loads(offloaded.loads, self.model.cache)
        for load in step.loads:
            if not load.is_async:
                self._store(load)
        self._encode(plan)
        self._take_back(plan)
        results = NO_RESULTS if self._connector is None else self._connector.results(step.number)
        invalid = results.invalid_block_ids
        output = self.model.run_work(replace(step.work, zeroed=()), step.void, invalid)
        self._dropped[plan.step] = self.model.void_names
        if invalid:
            self._void[plan.step] = self.model.names_holding(invalid)
            for later in self._sent:
                later.void |= self._void[plan.step]
        if self._config.pooling:
            output = pooled_output(plan)
        output = replace(
            output,
            nan_requests=self._nan_requests(plan, output),
            slack_seconds=_SLACK_SECONDS if self._world.number % 2 else None,
        )
        if self._tier is not None:
            return replace(output, kv_transfers=self._tier.end_step(self.model.cache))
        if self._connector is None:
            return output
        for key in results.finished_recving:
            if load := self._late_loads.pop(key, None):
                self._store(load)
        self.model.cache.garble(results.invalid_block_ids)
        return replace(output, kv_transfers=results)

    def _take_back(self, plan: SchedulerOutput) -> None:
        """Removes the dropped tokens of requests, before a step continues without them."""
        if self._last_plan is not None:
            self._stale |= self._last_plan.dropped
        for request in self._stale.intersection(plan.requests) - plan.dropped:
            self.model.take_back(request)
            self._stale.remove(request)
        self._last_plan = plan

    def _begin_load(self, load: SentLoad) -> None:
        """Begins an asynchronous load. Every second request's load writes to the cache at once."""
        if load.request % 2:
            self._store(load)
        else:
            self._late_loads[load.request] = load

    def _store(self, load: SentLoad) -> None:
        state_end = min(load.end, len(load.stored.token_ids) - 1)
        self.model.cache.load(load.blocks, load.stored.digests, load.begin, load.end, state_end)

    def _encode(self, plan: SchedulerOutput) -> None:
        """Computes the encoder inputs of a step, and checks that the embeddings of all items at the
        step's positions are stored.
        """
        for identifier in plan.evicted_encoder_inputs:
            self._items.pop(identifier, None)
        for request, indexes in plan.encoder_inputs.items():
            for index in indexes:
                item = request.encoder_inputs[index]
                self._items[item.identifier] = item.num_embeds
        starts = plan.num_computed_tokens
        for request, start, end in zip(plan.requests, starts, _ends(plan), strict=True):
            for item in request.encoder_inputs:
                if item.has_embeds_between(start, end):
                    assert item.identifier in self._items, f"{item} was not computed"
        if all(event.incident.name != "RESET_ENCODER_CACHE" for event in self._world.events):
            assert sum(self._items.values()) <= max(self._config.encoder_cache_size, 0)

    def _nan_requests(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> frozenset[int]:
        return frozenset(
            index
            for index, (request, tokens) in enumerate(
                zip(plan.requests, output.token_ids, strict=True)
            )
            if tokens and _is_nan(self._arrivals[request.request_id], request)
        )


def _loads(plan: SchedulerOutput) -> list[SentLoad]:
    """The loads of a plan. A synchronous load ends before the tokens of its step are computed."""
    starts = dict(zip(plan.requests, plan.num_computed_tokens, strict=True))
    loads = []
    for load in plan.loads:
        request = load.request
        end = request.num_computed_tokens if load.is_async else starts[request]
        blocks = tuple(map(list, load.blocks))
        begin, stored = end - load.num_tokens, stored_tokens(request)
        loads.append(SentLoad(request.key, load.is_async, stored, blocks, begin, end))
    return loads


def stored_tokens(request: Request) -> StoredTokens:
    """The values that the KV cache stores for the positions of a request."""
    root = request.cache_salt, request.adapter_digest
    return StoredTokens(request.token_ids, root, request.encoder_inputs)


def _is_nan(arrival: Arrival, request: Request) -> bool:
    return arrival.nan_after is not None and request.num_output_tokens >= arrival.nan_after


def _ends(plan: SchedulerOutput) -> list[int]:
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    return [start + count for start, count in zip(starts, counts, strict=True)]
