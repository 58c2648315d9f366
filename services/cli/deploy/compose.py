"""The compose program: Docker's plugin, or docker-compose of version 1.29."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.cli.errors import CommandError

PORTS = (
    *("HTTP_PORT", "GRPC_PORT", "JAEGER_PORT", "PROMETHEUS_PORT"),
    *("ALERTMANAGER_PORT", "GRAFANA_PORT"),
)
"""Environment variables that set the published ports in the compose files."""
_BUILDKIT = {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}


class Compose:
    """Runs the compose program for one project."""

    def __init__(self, files: Sequence[Path], project: str) -> None:
        """Raises CommandError if a file or the compose program does not exist."""
        for path in files:
            if not path.is_file():
                raise CommandError(f"--file {path} does not exist", exit_status=2)
        self._program = compose_program()
        self._options = ["--project-name", project]
        for path in files:
            self._options += ["--file", str(path)]

    def up(self, *, build: bool) -> None:
        """Starts all containers. Missing images are built first, or all images if `build` is set.
        If no environment variable sets a published port, a free port is published.
        """
        ports = {name: "0" for name in PORTS if name not in os.environ}
        self._run("up", "--detach", *(["--build"] if build else []), environ=ports)

    def down(self) -> None:
        """Removes the project's containers, networks and volumes."""
        self._run("down", "--volumes")

    def _run(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        command = [*self._program, *self._options, *arguments]
        status = subprocess.call(
            command, env={**os.environ, **_BUILDKIT, **(environ or {})}, stdin=subprocess.DEVNULL
        )
        if status != 0:
            raise CommandError(f"`{' '.join(command)}` failed with status {status}")


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
