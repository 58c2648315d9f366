"""Checks the services while they run."""

import asyncio
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.__main__ import Gateway
from services.kvpool.__main__ import PoolService
from services.scheduler.__main__ import SchedulerService
from services.scheduler.core.engine.engine_core import EngineState
from services.simulation.explore.answer import Answer
from services.simulation.explore.contents import blocks_in_tables, wrong_blocks
from services.simulation.explore.fleet import Fleet
from services.simulation.explore.left import pools_of
from services.worker.core.model_runner import ModelRunner

_LOOK_SECONDS = 0.02
_LONGEST_LOOK_SECONDS = 0.5
_NOTICE_SECONDS, _BUSY_NOTICE_SECONDS = 0.12, 0.5
"""Seconds within which the services notice that a client has disconnected. The second value applies
if all services are busy.
"""
_STALL_SECONDS, _CALM_STALL_SECONDS = 12.0, 3.0
"""Seconds within which a scheduler computes a step, or notices that it cannot. The second value
applies if the run has no faults.
"""
_ANSWER_SECONDS, _CALM_ANSWER_SECONDS = 7.0, 0.4
"""Seconds within which a scheduler accepts or refuses a sequence, or reports its end. The second
value applies if the run has no faults. With faults, a gateway may first have to end its session
with a scheduler that does not reply.
"""
_NAME = re.compile(r"(?:\w+-)?request-(\d+)(?:-(\d+))?")


Waits = dict[Hashable, tuple[float, str]]
"""Maps a wait to its limit in seconds, and to the error message if the wait exceeds the limit."""


def request_name(number: int) -> str:
    return f"request-{number}"


@dataclass(slots=True)
class Watch:
    """Checks the services periodically. `answers` maps requests' numbers to the answers that their
    clients have received so far. The services in `disturbed` have faults and may be late.
    """

    fleet: Fleet
    answers: Mapping[int, Answer]
    disturbed: Collection[str]
    has_no_faults: bool
    is_busy: bool
    """Whether all services have pauses."""
    gateway_pause_seconds: float
    """Limit of gateways' pauses if only they have pauses."""
    _since: dict[Hashable, float] = field(default_factory=dict)
    """Maps each wait to the time at which it was first observed."""

    @property
    def is_calm(self) -> bool:
        return self.has_no_faults and not self.is_busy

    async def run(self) -> None:
        """Raises AssertionError if an invariant is violated: each pool counts its blocks correctly,
        each scheduler computes steps, and each gateway has only sequences that their schedulers
        know and whose clients still wait for the answer.
        """
        seconds = _LOOK_SECONDS
        while True:
            await asyncio.sleep(seconds)
            seconds = min(1.02 * seconds, _LONGEST_LOOK_SECONDS)
            self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        waits: Waits = {}
        for name, service in self.fleet.services.items():
            if service.process.is_dead:
                continue
            match service.process.inside:
                case PoolService() as pool:
                    for hosted in pool.host.pools():
                        hosted.pool.check()
                case Gateway() as gateway:
                    self._check_gateway(name, gateway, now)
                    if name not in self.disturbed:
                        waits |= self._unknown(name, gateway)
                case SchedulerService() as scheduler:
                    _check_plans(name, scheduler)
                    if name not in self.disturbed:
                        waits |= self._stall(name, scheduler)
                case ModelRunner() as runner if self.has_no_faults:
                    self._check_loads(name, runner)
                    waits |= self._wrong_blocks(name, runner)
        self._since = {what: self._since.get(what, now) for what in waits}
        for what, (longest, sentence) in waits.items():
            if now > self._since[what] + longest:
                raise AssertionError(f"{sentence} for {longest:g} s")

    def _check_loads(self, name: str, runner: ModelRunner) -> None:
        tier: Any = runner.tier
        if tier is not None and tier._loads.targets - blocks_in_tables(pools_of(self.fleet, name)):
            raise AssertionError(f"{name} loads into blocks of no request")

    def _wrong_blocks(self, name: str, runner: ModelRunner) -> Waits:
        """Returns waits for the contents of cached blocks. A block is cached a few milliseconds
        before the step that computes it has ended.
        """
        longest = _BUSY_NOTICE_SECONDS if self.is_busy else _NOTICE_SECONDS
        sentence = f"{name} has a cached block with other tokens"
        blocks = wrong_blocks(runner, pools_of(self.fleet, name))
        return {(name, *block): (longest, sentence) for block in blocks}

    def _stall(self, name: str, service: SchedulerService) -> Waits:
        """Returns the wait for a scheduler's next step. Empty if no step is due."""
        engine = service.parts.engine
        num_between_turns = len(engine.scheduler.queues.between_turns)
        if engine.state is EngineState.RECOVERING or len(engine.unfinished) <= num_between_turns:
            return {}
        longest = _CALM_STALL_SECONDS if self.is_calm else _STALL_SECONDS
        return {
            (name, engine.scheduler.steps.next_number): (longest, f"{name} has computed no step")
        }

    def _unknown(self, name: str, gateway: Gateway) -> Waits:
        """Returns waits for the sequences of a gateway that their schedulers do not have yet."""
        longest = _CALM_ANSWER_SECONDS if self.is_calm else _ANSWER_SECONDS
        waits: Waits = {}
        for replica in gateway.fleet.membership.replicas:
            scheduler = self.fleet.services[replica.address.partition(":")[0]].process.inside
            if isinstance(scheduler, SchedulerService):
                sessions = scheduler.parts.sessions._gateways
                known = {
                    handle
                    for session in sessions
                    if session.gateway_id.startswith(f"{name}-")
                    for handle in session.requests
                }
                sentence = f"{replica.address} has not answered {name}"
                for handle in replica.running.keys() - known:
                    waits[name, replica.address, handle] = (longest, sentence)
        return waits

    def _check_gateway(self, name: str, gateway: Gateway, now: float) -> None:
        fleet, replicas = gateway.fleet, gateway.fleet.membership.replicas
        running = [one for replica in replicas for one in replica.running.values()]
        notice = self.gateway_pause_seconds
        notice += _BUSY_NOTICE_SECONDS if self.is_busy else _NOTICE_SECONDS
        for inflight in (*running, *fleet._waiting, *fleet.admission):
            if inflight.index not in inflight.mailbox._unfinished:
                raise AssertionError(f"{name} has a sequence that nobody waits for")
            if found := _NAME.fullmatch(inflight.request.request_id):
                answer, index = self.answers[int(found[1])], int(found[2] or 0)
                # If Redis loses an answer that two gateways share, the second gateway computes it
                # again for its own client, with the id of the first client's request.
                if all(index in one.finished for one in answer.same_key or (answer,)):
                    raise AssertionError(f"{name} has a sequence whose client has the whole answer")
                is_late = answer.left_at is not None and now > answer.left_at + notice
                if is_late and name not in self.disturbed:
                    raise AssertionError(f"{name} has a sequence whose client is gone")


def _check_plans(name: str, service: SchedulerService) -> None:
    """Checks that no step in flight computes a token after a request's longest possible output. The
    last token of an output is never computed. With drafts, a step begins at a position that is
    only an upper bound.
    """
    scheduler = service.parts.engine.scheduler
    if scheduler.config.num_speculative_tokens:
        return
    for plan in scheduler.steps.in_flight:
        steps = zip(plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        for request, start, num_tokens in steps:
            longest = max(request.num_prompt_tokens, request.max_num_tokens - 1)
            if start + num_tokens > longest:
                raise AssertionError(f"{name} computes a token after the end of a request")
