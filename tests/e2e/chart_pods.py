"""Runs the pods of a rendered Helm chart as processes of this machine, in the order in which a
kubelet starts containers.

Each pod has its own loopback address, so that its containers can use the ports of the manifests.
Volumes are directories. Names of Kubernetes services are replaced by the addresses of their pods.
"""

import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.rendered import Container, Object, Pod, Rendered
from tests.e2e.stack import ROOT, wait_for

SECONDS = 90.0
_POD_IP = "10.0.0.7"
_EVERY_ADDRESS = "0.0.0.0:"


def _loopback_address() -> str:
    """A loopback address that other processes are unlikely to use."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))


class RunningContainer:
    """A container of a pod, as a process that has only the container's environment variables."""

    def __init__(self, container: Container, directory: Path, names: Mapping[str, str]) -> None:
        """`names` maps texts in variables, such as service names, to their replacements."""
        self._container = container
        self._address = names[_EVERY_ADDRESS].removesuffix(":")
        self._environ = _environ(container, directory, names)
        self._log = directory / f"{container.spec['name']}.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self._container.service}"],
                cwd=ROOT,
                env=self._environ,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, probe: str) -> None:
        """Waits until a probe of the manifest succeeds."""
        wait_for(lambda: self._succeeds(probe), SECONDS)

    def _succeeds(self, name: str) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        probe = self._container.spec[name]["grpc"]
        with grpc.insecure_channel(f"{self._address}:{probe['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe["service"])
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS)

    def stop(self) -> int:
        """Sends SIGTERM, waits for the end, and returns the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SECONDS)


class RunningPods:
    """One pod of each component of the chart that runs Stepwell services."""

    def __init__(self, release: Rendered, directory: Path, names: Mapping[str, str]) -> None:
        self._directory = directory
        self.addresses = {pod.component: _loopback_address() for pod in release.pods()}
        self._names = {**names, _POD_IP: self.addresses["replica"]}
        self.containers: dict[str, list[RunningContainer]] = {}

    def start(self, pod: Pod, *, wait: bool = True) -> list[RunningContainer]:
        """Starts the containers of a pod, each after the previous one has started."""
        names = {**self._names, _EVERY_ADDRESS: self.addresses[pod.component] + ":"}
        running = self.containers.setdefault(pod.component, [])
        for container in pod.containers():
            directory = self._directory / pod.component
            running.append(RunningContainer(container, directory, names))
            if wait:
                running[-1].wait_for("startupProbe")
        return running

    def kill(self) -> None:
        for containers in self.containers.values():
            for container in containers:
                container.kill()


def _environ(container: Container, directory: Path, names: Mapping[str, str]) -> dict[str, str]:
    """The container's environment variables, adapted to this machine."""
    for path, volume in container.mounts().items():
        _make(directory / path.lstrip("/"), volume, directory.parent)
    mounts = sorted(map(re.escape, container.mounts()), key=len, reverse=True)
    paths = re.compile(rf"(?<![^:,=])(?=(?:{'|'.join(mounts)})(?:/|$))")
    environ = {}
    for variable, text in container.environment().items():
        value = paths.sub(str(directory), text)
        for name, here in names.items():
            value = value.replace(name, here)
        environ[variable] = value
    return environ


def _make(mount: Path, volume: Object, secrets_and_model: Path) -> None:
    """Creates a volume's directory. Secrets and the model are copied from the test's directory."""
    if mount.exists():
        return
    mount.parent.mkdir(parents=True, exist_ok=True)
    if "secret" in volume:
        mount.symlink_to(secrets_and_model / "secrets" / volume["secret"]["secretName"])
    elif volume["name"] == "model":
        mount.symlink_to(secrets_and_model / "models")
    else:
        mount.mkdir()
