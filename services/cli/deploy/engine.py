"""Accesses the containers of a compose project through Docker's SDK."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from services.cli.deploy.ports import Container, Fault
from services.cli.errors import CommandError

ROLE_LABEL, REPLICA_LABEL = "stepwell.role", "stepwell.replica"
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_HTTP_PORT = "8000/tcp"
_CONNECT_SECONDS = 10.0
_ANY_HOST = ("0.0.0.0", "::", "")
_KILL = "kill -9 $(cat /proc/1/task/1/children)"
"""The shell command that kills the service from inside its container. The container engine does not
restart a container after the engine's own `kill`. Process 1 is the init program, which cannot be
killed from inside. The service is its child.
"""


class ComposeProject:
    """The containers of one project. Errors of the container engine are raised as CommandError."""

    def __init__(self, name: str) -> None:
        """Raises CommandError if no container engine is available."""
        try:
            import docker  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise CommandError(
                "the package docker is missing: pip install 'stepwell[deploy]'"
            ) from error
        self._errors = docker.errors.DockerException
        try:
            _require_listener(docker.utils.parse_host(os.environ.get("DOCKER_HOST")))
            self._client = docker.from_env()
            self.engine_version = str(self._client.version()["Version"])
        except (OSError, self._errors) as error:
            raise CommandError(
                f"no Docker engine answers: {_reason(error)}; start one, or name it in DOCKER_HOST"
            ) from error
        self._name = name

    def containers(self) -> Sequence[Container]:
        return sorted(map(_container, self._list()), key=lambda container: container.name)

    def url(self) -> str:
        """The published URL of the HTTP API: the proxy's, or without a proxy the gateway's. Raises
        CommandError if there is none.
        """
        for role in ("proxy", "gateway"):
            for found in self._list(f"{ROLE_LABEL}={role}"):
                for binding in found.ports.get(_HTTP_PORT) or ():
                    host = "127.0.0.1" if binding["HostIp"] in _ANY_HOST else binding["HostIp"]
                    return f"http://{host}:{binding['HostPort']}"
        raise CommandError(f"project {self._name} publishes no gateway")

    @contextmanager
    def broken(self, container: Container, fault: Fault) -> Iterator[None]:
        with ExitStack() as scope:
            try:
                victim = self._client.containers.get(container.id)
                scope.callback(_apply(victim, fault, self._client.networks))
            except self._errors as error:
                raise CommandError(f"{fault.value} {container.name}: {_reason(error)}") from error
            yield

    def _list(self, *labels: str) -> list[Any]:
        wanted = [f"{_PROJECT_LABEL}={self._name}", *labels]
        try:
            listed: list[Any] = self._client.containers.list(
                all=True, filters={"label": wanted}, ignore_removed=True
            )
        except self._errors as error:
            raise CommandError(f"the Docker engine fails: {_reason(error)}") from error
        return listed


def _require_listener(url: str) -> None:
    """Raises OSError if nothing listens on the Unix socket of a URL. Docker's SDK would leak a
    socket when it fails to connect.
    """
    scheme, _, path = url.partition("://")
    if scheme != "http+unix":
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect(path)
        except OSError as error:
            raise OSError(f"{path}: {error.strerror or error}") from error


def _apply(victim: Any, fault: Fault, networks: Any) -> Any:
    """Applies a fault to a container of Docker's SDK. Returns a function that undoes the fault."""
    if fault is Fault.KILL:
        result = victim.exec_run(["sh", "-c", _KILL])
        # The exit code is 137 or None if the container ended before the shell that runs `kill`.
        if result.exit_code not in (0, 137, None):
            raise CommandError(
                f"{victim.name} could not be killed from inside, which takes `init: true` in the "
                f"compose file: {result.output.decode(errors='replace').strip()}"
            )
        return lambda: None
    if fault is Fault.PAUSE:
        victim.pause()
        return victim.unpause
    if fault is Fault.STOP:
        victim.stop()
        return victim.start
    attached = victim.attrs["NetworkSettings"]["Networks"]
    with ExitStack() as undo:
        for name, endpoint in attached.items():
            network = networks.get(endpoint["NetworkID"] or name)
            network.disconnect(victim)
            undo.callback(partial(network.connect, victim, aliases=_aliases(victim, endpoint)))
        return undo.pop_all().close


def _container(found: Any) -> Container:
    state = found.attrs["State"]
    health = state.get("Health", {}).get("Status", "healthy")
    problem = state["Status"] if state["Status"] != "running" else health
    endpoints = found.attrs["NetworkSettings"]["Networks"].values()
    return Container(
        id=found.id,
        name=found.labels.get(_SERVICE_LABEL, found.name),
        role=found.labels.get(ROLE_LABEL, ""),
        replica=found.labels.get(REPLICA_LABEL, ""),
        problem="" if problem == "healthy" else problem,
        started_at=state["StartedAt"],
        tag=found.attrs["Config"]["Image"].rpartition(":")[2],
        hosts=frozenset(name for endpoint in endpoints for name in _aliases(found, endpoint)),
    )


def _aliases(found: Any, endpoint: dict[str, Any]) -> list[str]:
    """The names of a container in a network, except the container's id."""
    return [name for name in endpoint.get("Aliases") or () if not found.id.startswith(name)]


def _reason(error: Exception) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).strip().splitlines()[0]
