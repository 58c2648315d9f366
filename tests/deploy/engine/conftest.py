"""Fixtures for tests with a real Docker engine: the repository's images, and running compose files.

If the engine has no image of another project (such as Jaeger) and cannot pull it, a stand-in
replaces the image. The summary of the test run lists the stand-ins. Builds of images
use the environment variables `BASE` (base image) and `DOCKER_ARGS` (arguments of `docker build`).
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.cli.deploy.check import until_healthy
from services.cli.deploy.compose import PORTS, Compose
from services.cli.deploy.engine import ComposeProject
from services.cli.errors import CommandError
from tests.deploy.compose_files import DIRECTORY, ROOT, services_of

STANDINS = {
    "redis": ("REDIS_IMAGE", "redis"),
    "prometheus": ("PROMETHEUS_IMAGE", "prometheus"),
    "alertmanager": ("ALERTMANAGER_IMAGE", "alertmanager"),
    "otel-collector": ("COLLECTOR_IMAGE", "page"),
    "jaeger": ("JAEGER_IMAGE", "page"),
    "grafana": ("GRAFANA_IMAGE", "page"),
    "proxy": ("HAPROXY_IMAGE", "haproxy"),
}
"""Maps each service of another project to the environment variable that names its image, and to the
build stage of its stand-in.
"""
_PULL_SECONDS = 120
_START_SECONDS = 900
_REPLACED = pytest.StashKey[list[str]]()


@dataclass(frozen=True)
class Up:
    """A set of running compose files. `url` is the address of the gateway's HTTP API."""

    project: ComposeProject
    name: str
    url: str

    def url_of(self, service: str, port: int) -> str:
        """The URL at which a port of a service is published."""
        (found,) = [one for one in self.containers() if one.labels[_SERVICE_LABEL] == service]
        (binding, *_) = found.ports[f"{port}/tcp"]
        return f"http://127.0.0.1:{binding['HostPort']}"

    def containers(self) -> list[Any]:
        """The containers, as objects of Docker's SDK."""
        listed: list[Any] = docker_client().containers.list(
            filters={"label": f"com.docker.compose.project={self.name}"}
        )
        return listed


_SERVICE_LABEL = "com.docker.compose.service"


def docker_client() -> Any:
    """A client of the Docker engine, from Docker's SDK."""
    import docker  # noqa: PLC0415 - tests that need no engine are collected without it

    return docker.from_env(timeout=120)


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips the tests, with the reason, if no Docker engine answers."""
    try:
        ComposeProject("stepwell-test")
    except CommandError as error:
        pytest.skip(error.sentence)


@pytest.fixture(scope="session")
def images(engine: None) -> None:  # noqa: ARG001
    """Builds the images of the repository's own Dockerfiles."""
    subprocess.run(["make", "images"], cwd=ROOT, check=True)


@pytest.fixture(scope="session")
def published(images: None, request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:  # noqa: ARG001
    """Replaces missing images by stand-ins, by environment variables. Tests may set others."""
    replaced = request.config.stash.setdefault(_REPLACED, [])
    services = services_of("compose.yaml", "two-gateways.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name in PORTS:
            patch.setenv(name, "0")
        for name, (variable, stage) in STANDINS.items():
            image = os.environ.get(variable, services[name]["image"])
            if not _is_there(image):
                patch.setenv(variable, _standin(stage))
                replaced.append(f"{image} by {_standin(stage)}")
        yield patch


def _is_there(image: str) -> bool:
    def docker(*arguments: str) -> bool:
        try:
            ended = subprocess.run(
                ["docker", *arguments, image],
                capture_output=True,
                timeout=_PULL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0

    return docker("image", "inspect") or docker("pull", "--quiet")


def _standin(stage: str) -> str:
    """Builds a stand-in image, unless it exists. Returns its name."""
    image = f"stepwell/standin-{stage}:0"
    if _is_built(image):
        return image
    services = services_of("services.yaml")
    base = services["gateway"]["build"]["args"]["BASE"]
    subprocess.run(
        [
            *("docker", "build", *os.environ.get("DOCKER_ARGS", "").split()),
            *("--build-arg", f"BASE={os.environ.get('BASE') or base}"),
            *("--build-arg", f"SERVICE={services['kvpool']['image']}"),
            *("--target", stage, "--tag", image, str(Path(__file__).parent / "standins")),
        ],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        check=True,
    )
    return image


def _is_built(image: str) -> bool:
    asked = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False)
    return asked.returncode == 0


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Lists the images that stand-ins replaced."""
    for line in config.stash.get(_REPLACED, []):
        terminalreporter.write_line(f"could not be had, and was replaced: {line}")


@pytest.fixture(scope="session")
def up(published: pytest.MonkeyPatch) -> Iterator[Callable[..., Up]]:
    """A function that starts compose files under a project name. They run, and their environment
    variables stay set, until the end of the test session.
    """
    with ExitStack() as scope:

        def start(name: str, *files: str, **variables: str) -> Up:
            for variable, value in variables.items():
                published.setenv(variable, value)
            compose = Compose([DIRECTORY / file for file in files], name)
            scope.callback(compose.down)
            compose.up(build=False)
            project = ComposeProject(name)
            until_healthy(project, _START_SECONDS)
            return Up(project, name, "" if "replica.yaml" in files else project.url())

        yield start


@pytest.fixture(scope="session")
def fleet(up: Callable[..., Up]) -> Up:
    """The services of compose.yaml, running."""
    return up("stepwell-test", "compose.yaml")
