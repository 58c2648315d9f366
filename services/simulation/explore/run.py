"""Runs the plan of one seed: the fleet, its load, and the checks afterwards."""

import asyncio
from asyncio import create_task
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.scheduler.__main__ import SchedulerService
from services.scheduler.core.policies import PROGRAM, holds_ended
from services.simulation.explore.answer import Answer
from services.simulation.explore.clients import ask
from services.simulation.explore.contents import forget_hashes
from services.simulation.explore.faults import Kind, inject, keep_busy
from services.simulation.explore.fleet import Fleet
from services.simulation.explore.left import late_timers, left_on_disks, what_is_left
from services.simulation.explore.lines import line_of_hang, line_of_step, unexpected_line
from services.simulation.explore.members import NUM_BLOCKS, Shape
from services.simulation.explore.plan import Plan
from services.simulation.explore.requests import (
    LONG,
    PROBE,
    PROBE_HITS,
    PROBE_KEPT,
    PROBE_VECTOR,
    Arrival,
    Request,
)
from services.simulation.explore.requests import Kind as RequestKind
from services.simulation.explore.watch import Watch, request_name
from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.machine import run_on
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process, State
from services.simulation.runtime.streams import MemoryStreams

_BLOCK_SIZE = 16
_START_SECONDS = 20.0
_SETTLE_SECONDS = 3.0
_CALM_SETTLE_SECONDS = 0.15
"""Seconds after which all work has ended if there are no faults and no abandoned answers."""
_PIN_SECONDS = 120.0
"""Limit on the time for which a scheduler keeps blocks of ended requests."""
_REDIS_SECONDS = 1.2
"""Seconds within which gateways find a new pool in Redis, where they look once per second."""
_ANSWER_SECONDS = 120.0
_TAKEOVER_SECONDS = 15.0
"""Seconds within which a gateway notices that a replica hangs, and another replica answers."""
_CALM_ANSWER_SECONDS = 5.0
"""Seconds within which any answer is complete if there are no faults."""
_QUIET_SECONDS = 10.0
"""Seconds without load before the last checks: more than two timeouts of the streams between
gateways and schedulers, and more than the time after which a client's idle session ends.
"""
_PROBE_SECONDS = 2.0
_GIVEN_UP = "every step with this request lost the workers"
"""A part of the error message for a request whose steps always fail."""
_LONGEST_FAULT_SECONDS = 300.0
_STOP_SECONDS = 30.0


class Failed(AssertionError):
    """A check of the run has failed."""


@dataclass(slots=True)
class Report:
    """The result of a run."""

    plan: Plan
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


CheckLog = Callable[[bytes], Sequence[str]]
"""Returns sentences about what is wrong with the bytes of a step log."""


class Explorer:
    """Runs plans with one model. Stores the answer that each request has when it runs alone."""

    def __init__(self, model: Path, check_log: CheckLog) -> None:
        self._model = model
        self._check_log = check_log
        self._alone: dict[Request, Answer] = {}

    def run(self, plan: Plan) -> Report:
        """Runs one plan. Calling `prepare` for many plans before is faster."""
        self.prepare([plan])
        forget_hashes()
        network = _network(plan.seed)
        device = [(fault.service, fault.rule) for fault in plan.faults if fault.kind is Kind.DEVICE]
        fleet = Fleet(network, self._model, plan.shape, device)
        report = Report(plan, network.lines)
        answers: dict[int, Answer] = {}
        probe = self._alone[(PROBE_VECTOR if plan.shape.pools else PROBE).usual()]
        try:
            run_on(network, plan.seed, lambda: _Run(plan, fleet, network, answers, probe).main())
        except Exception as error:
            report.failures.append(f"{type(error).__name__}: {error}")
        report.failures += network.errors
        report.failures += self._compare(plan, answers)
        for name, service in fleet.services.items():
            for file in service.process.files:
                report.failures += [f"{name}: {what}" for what in self._check_log(file.content)]
        return report

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Computes the answers that the requests of some plans have alone: one after the other, in
        fleets without faults.
        """
        arrivals = (arrival for plan in plans for arrival in plan.arrivals)
        asked = (PROBE, PROBE_VECTOR, LONG, *(arrival.request for arrival in arrivals))
        wanted = dict.fromkeys(request.usual() for request in asked)
        missing = [request for request in wanted if request not in self._alone]
        for pools in (False, True):
            of_fleet = [one for one in missing if one.wants_vector is pools]
            if of_fleet:
                self._answer_alone(of_fleet, Shape(pools=pools))

    def _answer_alone(self, missing: Iterable[Request], shape: Shape) -> None:
        network = _network(0)
        fleet = Fleet(network, self._model, shape)

        async def main() -> None:
            fleet.start_all()
            async with asyncio.timeout(_START_SECONDS):
                await fleet.until_ready()
            for request in missing:
                self._alone[request] = answer = Answer()
                client = Process(network.loop, "client")
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await client.spawn(ask("gateway-0", request, answer))
                if answer.error is not None:
                    raise Failed(f"{request} alone: {answer.error}")
                if request == LONG:
                    _check_long(answer, fleet.services["scheduler-0"].process.inside)
            await fleet.stop_all(_STOP_SECONDS)

        run_on(network, 0, main)

    def _compare(self, plan: Plan, answers: dict[int, Answer]) -> list[str]:
        failures: list[str] = []
        for arrival in plan.arrivals:
            answer, alone = answers.get(arrival.number), self._alone[arrival.request.usual()]
            if answer is None:
                continue
            failures += _complaints(plan, arrival, answer)
            may_end = plan.excuses(arrival) or (plan.may_give_up and _GIVEN_UP in str(answer.error))
            if not (answer.equals(alone) or (may_end and answer.begins(alone))):
                what = f"request {arrival.number} {arrival.request}"
                failures.append(f"{what}: {answer} is not {alone}")
        return failures


def _check_long(answer: Answer, service: Any) -> None:
    """Checks the answer to LONG alone: it ends where the blocks end, and needs no preemption. The
    last token of an answer is never computed, but has a slot (memory for one token).
    """
    num_tokens = len(LONG.prompt) + len(answer.token_ids[0])
    if num_tokens != (num_slots := (NUM_BLOCKS - 1) * _BLOCK_SIZE):
        raise Failed(f"a request has {num_tokens} tokens, although {num_slots} fit in all blocks")
    if service.parts.engine.scheduler.num_preemptions:
        raise Failed("a request that needs all blocks is preempted although it runs alone")


def _complaints(plan: Plan, arrival: Arrival, answer: Answer) -> Iterator[str]:
    """Yields what is wrong with an answer, apart from its text."""
    if arrival.request.salt and answer.num_cached_tokens and not plan.faults:
        yield f"request {arrival.number} has cached tokens of another salt"
    if answer.seconds > _TAKEOVER_SECONDS and plan.spares_a_replica:
        yield f"request {arrival.number} was not answered by another replica"
    if answer.seconds > _CALM_ANSWER_SECONDS and not plan.faults:
        yield f"request {arrival.number} took {answer.seconds:.1f} s although nothing failed"


@dataclass(slots=True)
class _Run:
    plan: Plan
    fleet: Fleet
    network: Network
    answers: dict[int, Answer]
    whole_probe: Answer
    answers_by_key: dict[str, list[Answer]] = field(default_factory=dict)
    """Maps idempotency keys to the answers to their requests."""

    async def main(self) -> None:
        plan, fleet, lines = self.plan, self.fleet, self.network.lines
        fleet.start_all()
        await self._until_ready()
        num_lines = len(lines)
        timers = late_timers(self.network.loop)
        await self._serve()
        fleet.mend_devices()
        await asyncio.sleep(sum(fault.hang_seconds for fault in plan.faults))
        await self._until_ready()
        calm_seconds = _REDIS_SECONDS if plan.shape.has_redis else _CALM_SETTLE_SECONDS
        policy = plan.shape.setting("policy")
        # A client may leave while its blocks are loaded from the tier.
        is_slow = plan.faults or plan.shape.tier_gib or (policy is not None and holds_ended(policy))
        await asyncio.sleep(_SETTLE_SECONDS if is_slow else calm_seconds)
        await self._until_unpinned()
        self._look(num_lines, is_calm=not plan.faults)
        if plan.only_ends_schedulers and (line := line_of_hang(lines[num_lines:])):
            raise Failed(f"a scheduler ends before its requests end: {line}")
        num_lines = len(lines)
        await self._probe()
        await asyncio.sleep(_CALM_SETTLE_SECONDS)
        num_quiet = len(lines)
        await asyncio.sleep(_QUIET_SECONDS)
        self._look(num_lines, is_calm=True)
        if line := line_of_step(lines[num_quiet:]):
            raise Failed(f"a step is computed although nobody asks: {line}")
        if left := late_timers(self.network.loop) - timers:
            raise Failed(f"timers are left: {dict(left)}")
        await self._stop()

    async def _serve(self) -> None:
        plan, network = self.plan, self.network
        must_end = len(plan.faults) == 1
        injecting = [
            create_task(inject(fault, self.fleet, network, must_end=must_end))
            for fault in plan.faults
        ]
        for name in self.fleet.services:
            if plan.pause_seconds and name.startswith(plan.paused):
                busy = keep_busy(name, self.fleet, network, plan.pause_seconds)
                injecting.append(create_task(busy))
        disturbed = {fault.service for fault in plan.faults if fault.peer is None}
        is_busy = plan.pause_seconds > 0 and not plan.paused
        pause = plan.pause_seconds if plan.paused else 0.0
        watch = Watch(self.fleet, self.answers, disturbed, not plan.faults, is_busy, pause)
        watching = create_task(watch.run())
        clients = [self._client(arrival) for arrival in plan.arrivals]
        async with asyncio.timeout(_LONGEST_FAULT_SECONDS):
            await asyncio.gather(*injecting)
        hang_seconds = sum(fault.hang_seconds for fault in plan.faults)
        last = max((arrival.at_seconds for arrival in plan.arrivals), default=0.0)
        async with asyncio.timeout(_ANSWER_SECONDS + hang_seconds + last):
            await asyncio.gather(*clients)
        watching.cancel()
        if watching.done() and not watching.cancelled():
            watching.result()

    def _client(self, arrival: Arrival) -> "asyncio.Task[None]":
        process = Process(self.network.loop, f"client-{arrival.number}")
        answer = self.answers[arrival.number] = Answer()
        if key := arrival.request.key:
            answer.same_key = self.answers_by_key.setdefault(key, [])
            answer.same_key.append(answer)
        retries = self.plan.shape.setting("max_num_waiting") is not None
        return process.spawn(_client(arrival, answer, self.network, retries=retries))

    async def _until_ready(self) -> None:
        async with asyncio.timeout(_START_SECONDS):
            await self.fleet.until_ready()

    async def _until_unpinned(self) -> None:
        """Waits until no scheduler keeps blocks of ended requests. After a run with long waits, the
        policy `continuum-ttl` keeps them for long.
        """
        insides = [service.process.inside for service in self.fleet.services.values()]
        schedulers = [
            one.parts.engine.scheduler for one in insides if isinstance(one, SchedulerService)
        ]
        async with asyncio.timeout(_PIN_SECONDS):
            while any(one.holds_ended for one in schedulers):  # noqa: ASYNC110
                await asyncio.sleep(_CALM_SETTLE_SECONDS)

    def _look(self, first_line: int, *, is_calm: bool) -> None:
        if line := unexpected_line(self.network.lines[first_line:], is_calm=is_calm):
            raise Failed(f"a line of the log is unexpected: {line}")
        if left := what_is_left(self.fleet, self.plan.shape.num_gateways):
            raise Failed("; ".join(left))

    async def _probe(self) -> None:
        """Checks that each gateway replies soon, with the same answers to a session and to the same
        conversation, and that the conversation hits all full blocks of the session in the cache.
        With a salt, it must hit only its own blocks.
        """
        shape = self.plan.shape
        caches = not shape.pools and shape.setting("enable_prefix_caching") is None
        # The policy `program` may evict blocks of the probe before its retained contexts.
        retains, has_room = shape.setting("policy") == PROGRAM, shape.num_blocks == NUM_BLOCKS
        caches &= has_room or not retains
        for number in range(shape.num_gateways):
            num_kept = await self._ask_probe(number, replace(PROBE, kind=RequestKind.TURNS))
            if num_kept < PROBE_KEPT and not shape.pools:
                raise Failed("a replica does not keep the tokens of a session")
            salted = replace(PROBE, salt=f"salt of probe {number}")
            for probe, num_hits in zip((PROBE, salted), PROBE_HITS, strict=True):
                num_cached = await self._ask_probe(number, probe)
                is_kept = shape.num_replicas == 1 and has_room and not retains
                least = num_hits if is_kept else min(PROBE_HITS)
                if num_cached < least and caches:
                    raise Failed(f"a conversation does not find {least} tokens in the cache")
                if num_cached > num_hits:
                    raise Failed("a probe has cached tokens of another salt")

    async def _ask_probe(self, gateway: int, probe: Request) -> int:
        """Sends a probe to a gateway. Returns the number of its cached tokens."""
        request = PROBE_VECTOR if self.plan.shape.pools else probe
        client, answer = Process(self.network.loop, "probe"), Answer()
        async with asyncio.timeout(_PROBE_SECONDS):
            await client.spawn(ask(f"gateway-{gateway}", request, answer))
        if not answer.equals(self.whole_probe):
            raise Failed(f"a probe: {answer} is not {self.whole_probe}")
        await asyncio.sleep(_CALM_SETTLE_SECONDS)
        return answer.num_cached_tokens

    async def _stop(self) -> None:
        await self.fleet.stop_all(_STOP_SECONDS)
        if wrong := left_on_disks(self.fleet):
            raise Failed("; ".join(wrong))
        await asyncio.sleep(_SETTLE_SECONDS)
        if tasks := [task for task in asyncio.all_tasks() if _runs(task)]:
            raise Failed(f"tasks are left: {sorted(map(repr, tasks))}")
        network = self.network
        if network.listeners or network.connections:
            what = f"{list(network.listeners)} and {len(network.connections)} connections"
            raise Failed(f"addresses are left: {what}")


def _runs(task: "asyncio.Task[object]") -> bool:
    """Whether a task still runs in a process that was not killed."""
    process = getattr(task, "process", None)
    is_dead = isinstance(process, Process) and process.state is State.DEAD
    return task is not asyncio.current_task() and not is_dead


async def _client(arrival: Arrival, answer: Answer, network: Network, *, retries: bool) -> None:
    await asyncio.sleep(arrival.at_seconds)
    begin = network.loop.time()
    name, gateway = request_name(arrival.number), f"gateway-{arrival.gateway}"
    asking = ask(gateway, arrival.request, answer, name=name, retries=retries)
    try:
        async with asyncio.timeout(arrival.leaves_after_seconds):
            await asking
    except TimeoutError:
        answer.error = "left"
        if not arrival.request.key:  # With a key, another client may still wait for the answer.
            answer.left_at = network.loop.time()
    pauses = arrival.request.pause_seconds * (1 + len(arrival.request.later_prompts))
    answer.seconds = network.loop.time() - begin - pauses


def _network(seed: int) -> Network:
    network = Network(VirtualLoop(seed))
    MemoryStreams(network)
    return network
