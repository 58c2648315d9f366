"""The faults that `stepwell deploy check` injects into a deployment, and its results."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from services.cli.deploy.check import Check, Times, until_healthy
from services.cli.deploy.compose import Compose, compose_program
from services.cli.deploy.ports import Answer, Container, Fault
from services.cli.errors import CommandError

ROOT = Path(__file__).parents[3]
NOW = Times(hold_seconds=0.0, heal_seconds=0.0)


def container(name: str, replica: str = "", problem: str = "") -> Container:
    return Container(
        id=f"id-{name}",
        name=name,
        role=name.partition("-")[0],
        replica=replica,
        problem=problem,
        started_at="once",
        hosts=frozenset({name}),
    )


def answer(text: str, error: str = "", gap: float = 1) -> Answer:
    return Answer(frozenset({text}), error, gap)


@dataclass
class World:
    """A deployment and its gateway, simulated. A test sets the effect of a fault."""

    texts: list[str] = field(default_factory=lambda: ["a b", "c d"])
    after: list[Answer] | None = None
    """The answers of the streams after a fault. None if they equal the answers before it."""
    heals: bool = True
    load: dict[str, int] = field(default_factory=lambda: {"scheduler-0": 0, "scheduler-1": 2})
    events: list[str] = field(default_factory=list)
    is_broken: bool = False
    _starts: int = 0
    _containers: list[Container] = field(
        default_factory=lambda: [
            container("gateway"),
            *(container(f"{role}-{n}", n) for role in ("scheduler", "worker") for n in "01"),
        ]
    )

    def containers(self) -> Sequence[Container]:
        return self._containers

    @contextmanager
    def broken(self, victim: Container, fault: Fault) -> Iterator[None]:
        self.events.append(f"{fault.value} {victim.name}")
        self.is_broken = True
        if self.heals:
            self._starts += 1
            new = replace(victim, started_at=f"start {self._starts}")
            self._containers = [new if one == victim else one for one in self._containers]
        yield
        self.events.append(f"undo {victim.name}")

    def streams(self) -> "World":
        return self

    def running(self) -> dict[str, int]:
        return self.load

    def begin(self) -> None:
        self.events.append("begin")

    def answers(self) -> Sequence[Answer]:
        if self.is_broken and self.after is not None:
            return self.after
        return [answer(text, "", 0.1) for text in self.texts]


def run(world: World, faults: Sequence[Fault] = (Fault.KILL,)) -> tuple[int, list[str]]:
    said: list[str] = []
    wrong = Check(world, world, NOW, said.append).run(faults, ["worker"])
    return wrong, said


def test_every_fault_hits_the_replica_where_most_streams_run() -> None:
    world = World()
    wrong, said = run(world, list(Fault))
    assert wrong == 0
    assert world.events == [
        "begin",
        *("begin", "kill worker-1", "undo worker-1"),
        *("begin", "pause worker-1", "undo worker-1"),
        *("begin", "disconnect worker-1", "undo worker-1"),
    ]
    assert said[0].startswith("undisturbed: 2 streams")
    assert said[1].startswith(
        "kill worker-1: 2 streams ran (0 at scheduler-0, 2 at scheduler-1); longest gap 0.1 s; "
        "same texts, healed in "
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"after": [answer("a b"), answer("c", "it broke off")]},
            "1 streams failed, one with: it broke off",
        ),
        ({"after": [answer("a b"), answer("c x")]}, "1 streams gave another text"),
        (
            {"after": [answer("a b"), Answer(frozenset({"c d", "c x"}), "", 1)]},
            "1 streams gave another text",
        ),
        (
            {"load": {"scheduler-0": 0, "scheduler-1": 0}},
            "the streams ended before the fault: set a larger --max-tokens",
        ),
        ({"heals": False}, "after 0 s worker-1 was not started again"),
    ],
)
def test_what_goes_wrong_is_said(change: dict[str, object], reason: str) -> None:
    world = World()
    for name, value in change.items():
        setattr(world, name, value)
    wrong, said = run(world)
    assert wrong == 1
    assert said[-1].endswith(f"WRONG: {reason}")


def test_a_replica_that_stays_away_is_not_healed() -> None:
    world = World()
    seen = iter([world.load, world.load])
    world.running = lambda: next(seen, {"scheduler-0": 0})  # type: ignore[method-assign]
    wrong, said = run(world)
    assert wrong == 1
    assert said[-1].endswith("WRONG: after 0 s 1 of 2 replicas are ready")


def test_a_deployment_that_fails_by_itself_is_not_broken() -> None:
    world = World(after=[answer("", "no replica is ready")], is_broken=True)
    with pytest.raises(CommandError, match="before anything was broken: no replica is ready"):
        run(world)
    assert world.events == ["begin"]


def test_nothing_is_broken_before_a_stream_runs() -> None:
    world, idle = World(), {"scheduler-0": 0, "scheduler-1": 0}
    seen = iter([idle, idle])
    world.running = lambda: next(seen, world.load)  # type: ignore[method-assign]
    said: list[str] = []
    assert Check(world, world, Times(0.0, 9.0), said.append).run([Fault.KILL], ["worker"]) == 0
    assert said[-1].startswith("kill worker-1: 2 streams ran (0 at scheduler-0, 2 at scheduler-1)")


def test_a_role_that_no_container_has_is_refused() -> None:
    with pytest.raises(CommandError, match=r"^the deployment has no redis$"):
        Check(World(), World(), NOW, print).run([Fault.KILL], ["redis"])


def test_containers_that_do_not_become_healthy_are_named() -> None:
    world = World()
    world._containers = [container("gateway", problem="starting"), container("worker-0")]
    with pytest.raises(CommandError, match=r"^after 0 s gateway is starting$"):
        until_healthy(world, 0)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^--file .*none.yaml does not exist$"):
        Compose([tmp_path / "none.yaml"], "test")


def test_compose_is_the_plugin_or_a_program_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def program(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    with pytest.raises(CommandError, match=r"^there is no compose program"):
        compose_program()
    docker = program("docker", "exit 1")
    standalone = program("docker-compose", "exit 0")
    assert compose_program() == [standalone]
    program("docker", "exit 0")
    assert compose_program() == [docker, "compose"]


def test_without_an_engine_the_command_says_so(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "deploy", "check"],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("stepwell deploy: no Docker engine answers: ")
    assert line.endswith("; start one, or name it in DOCKER_HOST")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--faults", "kill,flood"], "--faults are of kill, pause, disconnect, not 'flood'"),
        (["--streams", "0"], "argument --streams: must be a whole number of at least 1, not '0'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], sentence: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.cli", "deploy", "check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, f"stepwell deploy: {sentence}\n")
