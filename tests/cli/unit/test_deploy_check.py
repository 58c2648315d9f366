"""The faults that `stepwell deploy check` injects into a deployment, and its results."""

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from services.cli.deploy.changes import Rotation, Upgrade
from services.cli.deploy.check import Check, until_healthy
from services.cli.deploy.compose import Compose, compose_program
from services.cli.deploy.faults import Break, Times
from services.cli.deploy.ports import Answer, Container, Fault, Trial
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
        tag="1",
        hosts=frozenset({name}),
    )


def answer(text: str, *breaks: str, error: str = "", gap: float = 1) -> Answer:
    return Answer(frozenset({text}), 3, breaks, error, gap)


@dataclass
class World:
    """A deployment and its gateway, simulated. A test sets the effect of a fault."""

    texts: list[str] = field(default_factory=lambda: ["a b", "c d"])
    after: list[Answer] | None = None
    """The answers of the streams after a fault. None if they equal the answers before it."""
    heals: bool = True
    load: dict[str, int] = field(default_factory=lambda: {"scheduler-0": 0, "scheduler-1": 2})
    events: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=lambda: ["key-0"])
    api_key: str | None = "key-0"
    is_broken: bool = False
    _starts: int = 0
    _containers: list[Container] = field(
        default_factory=lambda: [
            *(container(name) for name in ("gateway", "gateway-1", "proxy")),
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

    def stop(self, name: str) -> None:
        self.events.append(f"stop {name}")

    def replace(self, names: Sequence[str], tag: str) -> None:
        self.events.append(f"replace {' '.join(names)}")
        if self.heals:
            self._containers = [
                replace(one, tag=tag) if one.name in names else one for one in self._containers
            ]

    def create_key(self) -> str:
        self.keys.append(f"key-{len(self.keys)}")
        return self.keys[-1]

    def revoke_key(self, key: str) -> None:
        self.events.append(f"revoke {key}")
        if self.heals:
            self.keys.remove(key)

    def is_accepted(self, key: str, gateway: str) -> bool:
        self.events.append(f"{gateway} is asked for {key}")
        return key in self.keys

    def begin(self) -> None:
        self.events.append("begin")

    def answers(self) -> Sequence[Answer]:
        if self.is_broken and self.after is not None:
            return self.after
        return [answer(text, gap=0.1) for text in self.texts]


def run(world: World, *trials: Trial) -> tuple[int, list[str]]:
    """Runs trials, by default the kill of a worker."""
    said: list[str] = []
    check = Check(world, world, NOW.heal_seconds, said.append)
    return check.run(trials or [Break(world, Fault.KILL, "worker", NOW)]), said


def test_every_fault_hits_the_replica_where_most_streams_run() -> None:
    world = World()
    wrong, said = run(world, *(Break(world, fault, "worker", NOW) for fault in Fault))
    assert wrong == 0
    assert world.events == [
        "begin",
        *("begin", "kill worker-1", "undo worker-1"),
        *("begin", "pause worker-1", "undo worker-1"),
        *("begin", "disconnect worker-1", "undo worker-1"),
        *("begin", "stop worker-1", "undo worker-1"),
    ]
    assert said[0].startswith("undisturbed: 2 streams")
    assert said[1].startswith(
        "kill worker (worker-1): 6 streams ran, 0 failed, 0 broke and were sent again "
        "(at first 0 at scheduler-0, 2 at scheduler-1); longest gap 0.1 s; same texts, healed in "
    )


def test_a_whole_replica_is_stopped_after_its_scheduler_has_drained() -> None:
    world = World()
    assert run(world, Break(world, Fault.STOP, "replica", NOW))[0] == 0
    assert world.events[2:] == [
        *("stop scheduler-1", "stop worker-1", "undo worker-1", "undo scheduler-1")
    ]


def test_streams_may_break_only_with_their_gateway() -> None:
    world = World(after=[answer("a b", "it is away"), answer("c d")])
    assert run(world, Break(world, Fault.KILL, "gateway", NOW))[0] == 0
    world.is_broken = False
    wrong, said = run(world, Break(world, Fault.KILL, "scheduler", NOW))
    assert wrong == 1
    assert "6 streams ran, 0 failed, 1 broke and were sent again" in said[-1]
    assert said[-1].endswith("WRONG: 1 streams failed, one with: it is away")


def test_an_upgrade_leaves_each_gateway_a_replica_of_its_protocol() -> None:
    world = World()
    assert run(world, Upgrade(world, world, "2"))[0] == 0
    assert world.events[2:] == [
        *("stop scheduler-1", "replace scheduler-1 worker-1"),
        *("replace gateway-1", "replace gateway"),
        *("stop scheduler-0", "replace scheduler-0 worker-0"),
    ]


def test_an_upgrade_that_replaces_nothing_is_noticed() -> None:
    world = World(heals=False)
    wrong, said = run(world, Upgrade(world, world, "2"))
    assert wrong == 1
    assert said[-1].endswith("WRONG: gateway has the tag 1")


def test_an_upgrade_of_a_single_gateway_is_refused() -> None:
    world = World()
    world._containers = [container("gateway"), container("worker-0", "0")]
    with pytest.raises(CommandError, match=r"^an upgrade needs two gateways behind a proxy"):
        Upgrade(world, world, "2")


def test_every_gateway_must_refuse_the_key_that_was_rotated() -> None:
    world = World()
    assert run(world, Rotation(world, world, world, 0.0))[0] == 0
    assert world.api_key == "key-1"
    assert world.events[2:] == [
        *("gateway is asked for key-1", "gateway-1 is asked for key-1", "revoke key-0"),
        *("gateway is asked for key-0", "gateway-1 is asked for key-0"),
    ]
    world = World(heals=False)
    wrong, said = run(world, Rotation(world, world, world, 0.0))
    assert wrong == 1
    assert said[-1].endswith("WRONG: after 0 s gateway still accepts the revoked key")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"after": [answer("a b"), answer("c", error="it broke off")]},
            "1 streams failed, one with: it broke off",
        ),
        ({"after": [answer("a b"), answer("c x")]}, "1 streams gave another text"),
        (
            {"after": [answer("a b"), Answer(frozenset({"c d", "c x"}), 2, (), "", 1)]},
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
    world = World(after=[answer("", error="no replica is ready")], is_broken=True)
    with pytest.raises(CommandError, match="before anything was broken: no replica is ready"):
        run(world)
    assert world.events == ["begin"]


def test_nothing_is_broken_before_a_stream_runs() -> None:
    world, idle = World(), {"scheduler-0": 0, "scheduler-1": 0}
    seen = iter([idle, idle])
    world.running = lambda: next(seen, world.load)  # type: ignore[method-assign]
    said: list[str] = []
    kill = Break(world, Fault.KILL, "worker", NOW)
    assert Check(world, world, 9.0, said.append).run([kill]) == 0
    assert "(at first 0 at scheduler-0, 2 at scheduler-1)" in said[-1]


def test_a_role_that_no_container_has_is_refused() -> None:
    with pytest.raises(CommandError, match=r"^the deployment has no redis$"):
        run(World(), Break(World(), Fault.KILL, "redis", NOW))


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


class Engine(ThreadingHTTPServer):
    """A Docker engine with one container, of the project "mine"."""

    address_family = socket.AF_UNIX

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), EngineCalls)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


class EngineCalls(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        container = {
            "Id": "c1",
            "Name": "/mine-gateway-1",
            "State": {"Status": "exited", "StartedAt": "once"},
            "NetworkSettings": {"Networks": {}},
            "Config": {"Image": "stepwell/gateway:1", "Labels": {}},
        }
        answers: dict[str, object] = {
            "/version": {"Version": "29", "ApiVersion": "1.44"},
            "/containers/json": [{"Id": "c1"}] if "%3Dmine" in self.path else [],
            "/containers/c1/json": container,
        }
        path = re.sub(r"^/v[\d.]+", "", urlsplit(self.path).path)
        body = json.dumps(answers[path]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: object) -> None:
        pass


def test_a_project_with_containers_is_not_removed(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    calls = tmp_path / "calls"
    compose = tmp_path / "docker"
    compose.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$*" = "compose version" ]\n')
    compose.chmod(0o755)
    with Engine(tmp_path / "docker.sock") as engine:
        Thread(target=engine.serve_forever, daemon=True).start()

        def check(project: str) -> tuple[int, str]:
            ended = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "services.cli",
                    "deploy",
                    "check",
                    "--project-name",
                    project,
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DOCKER_HOST": f"unix://{tmp_path}/docker.sock",
                    "PATH": f"{tmp_path}:/usr/bin:/bin",
                },
                capture_output=True,
                text=True,
                check=False,
            )
            return ended.returncode, ended.stderr

        status, error = check("mine")
        assert status == 2
        assert error.startswith("stepwell deploy: the project mine already has containers")
        assert not calls.exists()
        check("fresh")
        assert "--project-name fresh" in calls.read_text()
        engine.shutdown()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--faults", "kill,flood"], "--faults are of kill, pause, disconnect, stop, not 'flood'"),
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
