"""Checks that clients' streams of text go on unchanged while a deployment's containers are broken.

The streams first run once without a fault. Then, for each fault and each role of a container:

1. The same streams begin. A stream that ends begins again.
2. A container of that role is broken, if possible in the replica that serves the most streams.
3. If the fault does not end by itself, it is undone after a while.
4. The streams end. Each must always have had the same text as in the run without a fault.
5. All containers must become healthy, and as many replicas must be ready as before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.client import ServerAway
from services.cli.deploy.ports import Answer, Container, Deployment, Fault, Fleet
from services.cli.errors import CommandError

_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds. A fault that does not end by itself is undone after `hold_seconds`. All
    containers must then be healthy within `heal_seconds`.
    """

    hold_seconds: float
    heal_seconds: float


class Check:
    """Checks one deployment. `say` is called with a line of text for each observation."""

    def __init__(
        self, deployment: Deployment, fleet: Fleet, times: Times, say: Callable[[str], None]
    ) -> None:
        self._deployment, self._fleet = deployment, fleet
        self._times, self._say = times, say
        self._expected: list[frozenset[str]] = []
        self._num_replicas = 0

    def run(self, faults: Sequence[Fault], roles: Sequence[str]) -> int:
        """Breaks a container of each role with each fault. Returns the number of failures. Raises
        CommandError if the streams fail without a fault.
        """
        self._check_undisturbed()
        wrong = [self._break(fault, role) for fault in faults for role in roles]
        return sum(wrong)

    def _check_undisturbed(self) -> None:
        streams = self._fleet.streams()
        begun = time.monotonic()
        streams.begin()
        answers = streams.answers()
        if failed := [answer.error for answer in answers if answer.error]:
            raise CommandError(f"a stream failed before anything was broken: {failed[0]}")
        self._expected = [answer.texts for answer in answers]
        self._num_replicas = len(self._fleet.running())
        self._say(
            f"undisturbed: {len(answers)} streams in {time.monotonic() - begun:.1f} s, "
            f"{self._num_replicas} ready replicas"
        )

    def _break(self, fault: Fault, role: str) -> bool:
        """Breaks one container. Returns whether the check failed."""
        containers, streams = self._deployment.containers(), self._fleet.streams()
        streams.begin()
        running = self._running_once_busy()
        victim = _victim(containers, role, running)
        broken_at = time.monotonic()
        with self._deployment.broken(victim, fault):
            if fault is not Fault.KILL:
                time.sleep(self._times.hold_seconds)
        answers = streams.answers()
        problem = self._until_healed(victim if fault is Fault.KILL else None)
        seconds = time.monotonic() - broken_at
        wrong = [*self._wrong(answers), *([problem] if problem else [])]
        if not any(running.values()):
            wrong.append("the streams ended before the fault: set a larger --max-tokens")
        gap = max(answer.longest_gap_seconds for answer in answers)
        loads = ", ".join(f"{number} at {host}" for host, number in sorted(running.items()))
        self._say(
            f"{fault.value} {victim.name}: {len(answers)} streams ran ({loads}); longest gap "
            f"{gap:.1f} s; "
            + (f"WRONG: {'; '.join(wrong)}" if wrong else f"same texts, healed in {seconds:.1f} s")
        )
        return bool(wrong)

    def _running_once_busy(self) -> dict[str, int]:
        """Returns the number of running requests of each replica. Waits until a request runs,
        because the replicas may have finished all requests while clients still read the streams.
        """
        deadline = time.monotonic() + self._times.heal_seconds
        while not any((running := self._fleet.running()).values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return running

    def _wrong(self, answers: Sequence[Answer]) -> list[str]:
        failed = [answer.error for answer in answers if answer.error]
        changed = sum(
            answer.texts != expected and not answer.error
            for answer, expected in zip(answers, self._expected, strict=True)
        )
        wrong = [f"{len(failed)} streams failed, one with: {failed[0]}"] if failed else []
        if changed:
            wrong.append(f"{changed} streams gave another text")
        return wrong

    def _until_healed(self, killed: Container | None) -> str:
        """Waits until the deployment is healthy. Returns what is unhealthy after the time limit."""
        deadline = time.monotonic() + self._times.heal_seconds
        while problem := self._problem(killed):
            if time.monotonic() > deadline:
                return f"after {self._times.heal_seconds:.0f} s {problem}"
            time.sleep(_POLL_SECONDS)
        return ""

    def _problem(self, killed: Container | None) -> str:
        for container in self._deployment.containers():
            if container.problem:
                return f"{container.name} is {container.problem}"
            if killed and container.id == killed.id and container.started_at == killed.started_at:
                return f"{container.name} was not started again"
        try:
            num_ready = len(self._fleet.running())
        except ServerAway as error:
            return error.sentence
        if num_ready < self._num_replicas:
            return f"{num_ready} of {self._num_replicas} replicas are ready"
        return ""


def until_healthy(deployment: Deployment, seconds: float) -> Sequence[Container]:
    """Waits until all containers are healthy. Raises CommandError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        containers = deployment.containers()
        ill = [f"{one.name} is {one.problem}" for one in containers if one.problem]
        if containers and not ill:
            return containers
        if time.monotonic() > deadline:
            raise CommandError(f"after {seconds:.0f} s {', '.join(ill) or 'no container runs'}")
        time.sleep(_POLL_SECONDS)


def _victim(containers: Sequence[Container], role: str, running: dict[str, int]) -> Container:
    """A container of the role, in the busiest replica if the role belongs to replicas."""
    candidates = [container for container in containers if container.role == role]
    if not candidates:
        raise CommandError(f"the deployment has no {role}", exit_status=2)
    busiest = max(running, key=lambda host: running[host], default="")
    replicas = {one.replica for one in containers if busiest in one.hosts and one.replica}
    return next((one for one in candidates if one.replica in replicas), candidates[0])
