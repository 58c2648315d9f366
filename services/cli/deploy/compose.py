"""The compose program: Docker's plugin, or docker-compose of version 1.29."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.cli.errors import CommandError

PORTS = (
    *("HTTP_PORT", "GRPC_PORT", "PROXY_HTTP_PORT", "PROXY_GRPC_PORT"),
    *("JAEGER_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "GRAFANA_PORT"),
)
"""Environment variables that set the published ports in the compose files."""
KEY_FILE = {"STEPWELL_GATEWAY_API_KEY_FILE": "/keys/keys.json"}
"""The environment variable with which gateways require API keys, and its value in the docs."""
_BUILDKIT = {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
_STEPWELL = ("-m", "services.cli")
_TENANT = "deploy-check"
_GATEWAY_URL = "http://127.0.0.1:8000"
"""The URL of a gateway inside its container."""


class Compose:
    """Runs the compose program for one project. Implements `Operator`."""

    def __init__(
        self, files: Sequence[Path], project: str, environ: Mapping[str, str] | None = None
    ) -> None:
        """Published ports that no environment variable sets will be free ones. Raises CommandError
        if a file or the compose program does not exist.
        """
        for path in files:
            if not path.is_file():
                raise CommandError(f"--file {path} does not exist", exit_status=2)
        self._begin = [*compose_program(), "--project-name", project]
        for path in files:
            self._begin += ["--file", str(path)]
        free = dict.fromkeys(PORTS, "0")
        self._environ = {**free, **os.environ, **_BUILDKIT, **(environ or {})}

    def up(self, *, build: bool) -> None:
        """Starts all containers. Builds missing images first, or all images if `build` is set."""
        self._run("up", "--detach", *(["--build"] if build else []))

    def down(self) -> None:
        """Removes the project's containers, networks and volumes."""
        self._run("down", "--volumes")

    def stop(self, name: str) -> None:
        self._run("stop", name)

    def replace(self, names: Sequence[str], tag: str) -> None:
        self._environ["TAG"] = tag
        self._run("up", "--detach", "--no-deps", *names)

    def create_key(self) -> str:
        """Creates the file of keys too if it is missing. No gateway needs to run."""
        printed = self._run_stepwell("keys", "create", "--json", "--tenant", _TENANT)
        return str(json.loads(printed)["key"])

    def revoke_key(self, key: str) -> None:
        self._run_stepwell("keys", "revoke", key)

    def is_accepted(self, key: str, gateway: str) -> bool:
        asked = subprocess.run(
            [
                *(*self._begin, "exec", "-T", "-e", f"STEPWELL_API_KEY={key}", gateway),
                *("python3", *_STEPWELL, "status", "--url", _GATEWAY_URL),
            ],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        return asked.returncode == 0

    def _run_stepwell(self, *arguments: str) -> str:
        """Runs a command of Stepwell in a container of its own, and returns what it prints."""
        options = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "python3", "gateway")
        return self._run(*options, *_STEPWELL, *arguments, stdout=subprocess.PIPE)

    def _run(self, *arguments: str, stdout: int | None = None) -> str:
        command = [*self._begin, *arguments]
        ended = subprocess.run(
            command,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise CommandError(f"`{' '.join(command)}` failed with status {ended.returncode}")
        return ended.stdout or ""


def compose_program() -> list[str]:
    """The words that begin a compose command line. Raises CommandError if compose is missing."""
    if docker := shutil.which("docker"):
        asked = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
        if asked.returncode == 0:
            return [docker, "compose"]
    if standalone := shutil.which("docker-compose"):
        return [standalone]
    raise CommandError(
        "there is no compose program: install Docker's compose plugin or docker-compose"
    )
