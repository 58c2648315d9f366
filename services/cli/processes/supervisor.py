"""Keeps child processes running, and stops them in order.

All children start at once, so that they load in parallel. If a child ends before it was ever ready,
the supervisor ends too. A child that ends later is restarted with its team (such as the workers of
a replica). A child that hangs is killed and then restarted with its team. Delays before restarts
grow with each consecutive restart. Erlang's supervisors and systemd do the same, but limit the
number of restarts. At the end of the run, stages (groups of children) stop one after the other,
each with its own time limit. Children that do not stop in time are killed. After the last stage,
children that have drained but still serve other children are stopped.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.cli.processes.child import Child, ChildSpec, describe_exit
from services.cli.processes.liveness import LivenessPolicy, until_hung
from services.common.process.watchdog.ended import note_ended

_LAST_STOP_SECONDS = 0.9
"""Seconds within which a drained child must end after the last stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Children that stop together, and their common time limit for stopping."""

    specs: tuple[ChildSpec, ...]
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays before a team is restarted. The delay grows with each consecutive death, and is reset
    after a run in which the whole team was ready for `steady_seconds`. When one child has ended,
    the other children of its team have `team_end_seconds` to end by themselves.
    """

    first_delay_seconds: float = 0.1
    factor: float = 2.0
    longest_delay_seconds: float = 10.0
    steady_seconds: float = 30.0
    team_end_seconds: float = 2.0

    def delay_seconds(self, num_deaths: int) -> float:
        """The delay after `num_deaths` consecutive deaths."""
        return min(
            self.first_delay_seconds * self.factor ** (num_deaths - 1), self.longest_delay_seconds
        )


class Observer(Protocol):
    """Receives the events of the children."""

    def line(self, name: str, text: str) -> None:
        """A child wrote a line."""

    def ready(self, name: str, seconds: float, num_restarts: int) -> None:
        """A child became ready, `seconds` after its start."""

    def hung(self, name: str, reason: str) -> None:
        """A child hangs and will be killed."""

    def died(
        self, name: str, status: str, tail: Sequence[str], delay_seconds: float, num_deaths: int
    ) -> None:
        """A child has ended, and its team is restarted after the delay. `num_deaths` is the number
        of consecutive deaths of the team.
        """

    def stopping(self, name: str) -> None:
        """A child will receive SIGTERM."""

    def killed(self, name: str, seconds: float) -> None:
        """A child did not stop within `seconds` and will be killed."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a child's run: exit status in words, seconds of readiness, and whether it hung."""

    status: str
    ready_seconds: float
    hung: bool


class Deaths:
    """Counts the deaths of a team since it was last ready for `steady_seconds`."""

    def __init__(self, steady_seconds: float) -> None:
        self.num_in_a_row = 0
        self.num_hangs = 0
        """The number of consecutive deaths in which a child hung."""
        self._steady_seconds = steady_seconds

    def ended(self, ends: Sequence[End]) -> None:
        if min(end.ready_seconds for end in ends) >= self._steady_seconds:
            self.num_in_a_row = self.num_hangs = 0
        self.num_in_a_row += 1
        self.num_hangs += any(end.hung for end in ends)


class StartFailed(Exception):
    """A child ended before it was ever ready."""

    def __init__(self, name: str, status: str, tail: Sequence[str]) -> None:
        super().__init__(f"{name} ended with {status} before it was ready")
        self.name = name
        self.status = status
        self.tail = tuple(tail)


class Supervisor:
    """Runs the children of all stages until `stop` is set."""

    def __init__(
        self,
        stages: Sequence[Stage],
        observer: Observer,
        restarts: RestartPolicy | None = None,
        liveness: LivenessPolicy | None = None,
    ) -> None:
        self._stages = stages
        self._observer = observer
        self._restarts = restarts or RestartPolicy()
        self._liveness = liveness or LivenessPolicy()
        self._children: dict[str, Child] = {}
        self._was_ready: dict[str, asyncio.Event] = {}
        self.all_ready = asyncio.Event()
        self.stop = asyncio.Event()
        self.kill_now = asyncio.Event()

    def pid(self, name: str) -> int:
        """The process id of a child's current or last run."""
        return self._children[name].pid

    def not_ready(self) -> list[str]:
        """Names of the children that have not been ready yet."""
        return [name for name, event in self._was_ready.items() if not event.is_set()]

    async def run(self) -> None:
        """Returns when `stop` was set and all children have ended. If a child ends before it was
        ever ready, stops all other children, and raises StartFailed when they have ended. Sets
        `all_ready` once each child has been ready. If `kill_now` is set during the stop, the
        remaining children are killed.
        """
        specs = [spec for stage in self._stages for spec in stage.specs]
        self._was_ready = {spec.name: asyncio.Event() for spec in specs}
        teams: dict[str, list[ChildSpec]] = {}
        for spec in specs:
            teams.setdefault(spec.team or spec.name, []).append(spec)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self.stop.wait()),
            *(asyncio.create_task(self._keep_running(team)) for team in teams.values()),
        ]
        announcer = asyncio.create_task(self._announce())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, announcer):
                task.cancel()
            await asyncio.gather(*tasks, announcer, return_exceptions=True)
            for stage in self._stages:
                await self._stop_stage(stage)
            drained = [child for child in self._children.values() if not child.ended]
            await self._stop(drained, _LAST_STOP_SECONDS, Child.wait)

    async def _announce(self) -> None:
        for event in self._was_ready.values():
            await event.wait()
        self.all_ready.set()

    async def _keep_running(self, team: Sequence[ChildSpec]) -> None:
        """Runs a team again and again. Raises StartFailed if a child ends and was never ready."""
        num_restarts, deaths = 0, Deaths(self._restarts.steady_seconds)
        while True:
            children = [await self._start(spec) for spec in team]
            runs = [
                asyncio.create_task(self._run_to_end(child, num_restarts, deaths.num_hangs))
                for child in children
            ]
            try:
                done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
                for run in done:
                    run.result()
                await self._end_team(children)
                ends = await asyncio.gather(*runs)
            finally:
                for run in runs:
                    run.cancel()
                await asyncio.gather(*runs, return_exceptions=True)
            deaths.ended(ends)
            delay_seconds = self._restarts.delay_seconds(deaths.num_in_a_row)
            for child, end in zip(children, ends, strict=True):
                name = child.spec.name
                self._observer.died(
                    name, end.status, child.tail, delay_seconds, deaths.num_in_a_row
                )
            await asyncio.sleep(delay_seconds)
            num_restarts += 1

    async def _start(self, spec: ChildSpec) -> Child:
        """Starts a child. If the system cannot start a process, raises StartFailed for a child that
        was never ready, and otherwise tries again until it can.
        """
        while True:
            try:
                child = await Child.start(spec, lambda text: self._observer.line(spec.name, text))
            except OSError as error:
                if not self._was_ready[spec.name].is_set():
                    raise StartFailed(spec.name, error.strerror or str(error), ()) from error
                self._observer.line(
                    spec.name,
                    f"the process cannot be started, and is tried again: {error.strerror}",
                )
                await asyncio.sleep(self._restarts.longest_delay_seconds)
            else:
                self._children[spec.name] = child
                return child

    async def _run_to_end(self, child: Child, num_restarts: int, num_hangs: int) -> End:
        """Waits for the end of a run. Raises StartFailed if no run of the child was ever ready."""
        spec, started, ready = child.spec, time.monotonic(), asyncio.Event()
        ready_at: float | None = None
        killing = asyncio.create_task(self._kill_when_hung(child, ready, num_hangs))
        try:
            if await _ready_before_its_end(child):
                ready.set()
                ready_at = time.monotonic()
                self._observer.ready(spec.name, ready_at - started, num_restarts)
                self._was_ready[spec.name].set()
            status = describe_exit(await child.wait())
            ready_seconds = 0.0 if ready_at is None else time.monotonic() - ready_at
        finally:
            killing.cancel()
            (hung,) = await asyncio.gather(killing, return_exceptions=True)
        if isinstance(hung, Exception):
            raise hung
        if not self._was_ready[spec.name].is_set():
            raise StartFailed(spec.name, status, child.tail)
        return End(status, ready_seconds, hung=hung is True)

    async def _kill_when_hung(self, child: Child, ready: asyncio.Event, num_hangs: int) -> bool:
        """Waits until a child hangs, kills it, and returns True. Returns False at once if the
        child's liveness is not checked.
        """
        if child.spec.liveness_address is None:
            return False
        reason = await until_hung(child, ready.is_set, num_hangs, self._liveness)
        self._observer.hung(child.spec.name, reason)
        note_ended(child.spec.liveness_address, child.pid)
        child.kill()
        return True

    async def _end_team(self, children: Sequence[Child]) -> None:
        """Waits `team_end_seconds` for the other children of a team to end, then kills them."""
        ends = [asyncio.create_task(child.wait()) for child in children]
        _, lasting = await asyncio.wait(ends, timeout=self._restarts.team_end_seconds)
        for child in children if lasting else ():
            child.kill()
        await asyncio.gather(*ends)

    async def _stop_stage(self, stage: Stage) -> None:
        children = [
            child
            for spec in stage.specs
            if (child := self._children.get(spec.name)) is not None and not child.ended
        ]
        for child in children:
            self._observer.stopping(child.spec.name)
        await self._stop(children, stage.stop_seconds, Child.wait_drained)

    async def _stop(
        self,
        children: Sequence[Child],
        stop_seconds: float,
        until_stopped: Callable[[Child], Coroutine[Any, Any, object]],
    ) -> None:
        if not children:
            return
        for child in children:
            child.terminate()
        stops = [asyncio.create_task(until_stopped(child)) for child in children]
        await self._until_ended(asyncio.gather(*stops), stop_seconds)
        for child, stopped in zip(children, stops, strict=True):
            if not stopped.done():
                self._observer.killed(child.spec.name, stop_seconds)
                child.kill()
        await asyncio.gather(*stops)

    async def _until_ended(self, ended: asyncio.Future[Any], stop_seconds: float) -> None:
        kill_now = asyncio.ensure_future(self.kill_now.wait())
        either: set[asyncio.Future[Any]] = {ended, kill_now}
        await asyncio.wait(either, timeout=stop_seconds, return_when=asyncio.FIRST_COMPLETED)
        kill_now.cancel()


async def _ready_before_its_end(child: Child) -> bool:
    ready = asyncio.ensure_future(child.spec.until_ready())
    ended = asyncio.ensure_future(child.wait())
    either: set[asyncio.Future[Any]] = {ready, ended}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        return ready.done()
    finally:
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)
