"""Checks that clients' streams of text continue unchanged while a deployment is broken or changed.

The streams first run once undisturbed. Then, for each trial:

1. The same streams begin. A stream that ends begins again.
2. The trial breaks containers (`faults.py`), replaces images, or rotates a key (`changes.py`).
3. The streams end. Each must always have had the same text as in the undisturbed run.
4. All containers must become healthy, and as many replicas must be ready as before.
"""

import time
from collections.abc import Callable, Sequence

from services.cli.client import ServerAway
from services.cli.deploy.ports import Answer, Container, Deployment, Fleet, Trial, Unhealthy
from services.cli.errors import CommandError

_POLL_SECONDS = 0.25


class Check:
    """Checks one deployment. Containers must become healthy within `heal_seconds`. `say` is called
    with a line of text for each observation.
    """

    def __init__(
        self, deployment: Deployment, fleet: Fleet, heal_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._deployment, self._fleet = deployment, fleet
        self._heal_seconds, self._say = heal_seconds, say
        self._expected: list[frozenset[str]] = []
        self._num_replicas = 0

    def run(self, trials: Sequence[Trial]) -> int:
        """Runs the trials. Returns the number of failed trials. Raises CommandError if the streams
        fail undisturbed.
        """
        self._check_undisturbed()
        return sum([self._goes_wrong(trial) for trial in trials])

    def _check_undisturbed(self) -> None:
        streams = self._fleet.streams()
        begun = time.monotonic()
        streams.begin()
        answers = streams.answers()
        if failures := [reason for answer in answers for reason in answer.failures]:
            raise CommandError(f"a stream failed before anything was broken: {failures[0]}")
        self._expected = [answer.texts for answer in answers]
        self._num_replicas = len(self._fleet.running())
        self._say(
            f"undisturbed: {len(answers)} streams in {time.monotonic() - begun:.1f} s, "
            f"{self._num_replicas} ready replicas"
        )

    def _goes_wrong(self, trial: Trial) -> bool:
        streams = self._fleet.streams()
        streams.begin()
        running = self._running_once_busy()
        begun = time.monotonic()
        names, unhealthy = list[str](), ""
        try:
            names += trial(running, lambda: until_healthy(self._deployment, self._heal_seconds))
        except Unhealthy as error:
            unhealthy = error.sentence
        answers = streams.answers()
        try:
            self._settle()
        except Unhealthy as error:
            unhealthy = unhealthy or error.sentence
        seconds = time.monotonic() - begun
        wrong = self._wrong(answers, may_break=trial.breaks_streams)
        wrong += [unhealthy] if unhealthy else []
        if not any(running.values()):
            wrong.append("the streams ended before the fault: set a larger --max-tokens")
        title = f"{trial.name} ({', '.join(names)})" if names else trial.name
        loads = ", ".join(f"{number} at {host}" for host, number in sorted(running.items()))
        self._say(
            f"{title}: {_counts(answers)} (at first {loads}); "
            f"longest gap {max(answer.longest_gap_seconds for answer in answers):.1f} s; "
            + (f"WRONG: {'; '.join(wrong)}" if wrong else f"same texts, healed in {seconds:.1f} s")
        )
        return bool(wrong)

    def _running_once_busy(self) -> dict[str, int]:
        """Returns the number of running requests of each replica. Waits until a request runs,
        because the replicas may have finished all requests while clients still read the streams.
        """
        deadline = time.monotonic() + self._heal_seconds
        while not any((running := self._fleet.running()).values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return running

    def _wrong(self, answers: Sequence[Answer], *, may_break: bool) -> list[str]:
        failures = [
            reason
            for answer in answers
            for reason in ([answer.error] if may_break else answer.failures)
            if reason
        ]
        changed = sum(
            answer.texts != expected and not answer.error
            for answer, expected in zip(answers, self._expected, strict=True)
        )
        wrong = [f"{len(failures)} streams failed, one with: {failures[0]}"] if failures else []
        if changed:
            wrong.append(f"{changed} streams gave another text")
        return wrong

    def _settle(self) -> None:
        deadline = time.monotonic() + self._heal_seconds
        while problem := self._problem():
            if time.monotonic() > deadline:
                raise Unhealthy(f"after {self._heal_seconds:.0f} s {problem}")
            time.sleep(_POLL_SECONDS)

    def _problem(self) -> str:
        if ill := _ill(self._deployment.containers()):
            return ill[0]
        try:
            num_ready = len(self._fleet.running())
        except ServerAway as error:
            return error.sentence
        if num_ready < self._num_replicas:
            return f"{num_ready} of {self._num_replicas} replicas are ready"
        return ""


def until_healthy(deployment: Deployment, seconds: float) -> Sequence[Container]:
    """Waits until all containers are healthy. Raises Unhealthy after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        containers = deployment.containers()
        ill = _ill(containers)
        if containers and not ill:
            return containers
        if time.monotonic() > deadline:
            raise Unhealthy(f"after {seconds:.0f} s {', '.join(ill) or 'no container runs'}")
        time.sleep(_POLL_SECONDS)


def _ill(containers: Sequence[Container]) -> list[str]:
    return [f"{one.name} is {one.problem}" for one in containers if one.problem]


def _counts(answers: Sequence[Answer]) -> str:
    num_runs = sum(answer.num_runs for answer in answers)
    num_failed = sum(bool(answer.error) for answer in answers)
    num_broken = sum(len(answer.breaks) for answer in answers)
    return f"{num_runs} streams ran, {num_failed} failed, {num_broken} broke and were sent again"
