"""The Helm chart's pods serve: their variables, sockets, ports, probes and certificates agree."""

import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import Authority, Files
from tests.deploy.conftest import example, render_chart
from tests.deploy.rendered import Rendered
from tests.e2e.chart_pods import RunningPods
from tests.e2e.conftest import TinyModel
from tests.redis_servers import needs_redis, redis_server

WORKER = {"settings": {"num_blocks": 200, "num_threads": 1, "kernels": "torch", "device": "cpu"}}


def _model() -> dict[str, Any]:
    """The chart's values for a model, whose volume is a directory of the test."""
    return {"name": "tiny", "path": "tiny", "volume": {"hostPath": {"path": "/models"}}}


@contextmanager
def running(
    values: dict[str, Any], model: TinyModel
) -> Iterator[tuple[Rendered, RunningPods, Path]]:
    """The pods of a release with TLS and a password-protected Redis, and their directory, whose
    path is short because the length of socket paths is limited.
    """
    release = render_chart({"release": values})["release"]
    assert release.refused is None, release.refused
    with tempfile.TemporaryDirectory(prefix="pods-") as directory:
        yield from _running(release, Path(directory), model)


def _running(
    release: Rendered, directory: Path, model: TinyModel
) -> Iterator[tuple[Rendered, RunningPods, Path]]:
    (directory / "models").mkdir()
    (directory / "models" / "tiny").symlink_to(model.directory)
    authority = Authority()
    for certificate in release.of("Certificate"):
        spec = certificate["spec"]
        if not spec.get("isCA"):
            issued = authority.issue(*spec["dnsNames"])
            Files(directory / "secrets" / spec["secretName"]).write(issued, authority)
    with redis_server(directory / "redis", "--requirepass", "secret") as redis:
        names = {"demo-stepwell-redis.llm.svc:6379": f"127.0.0.1:{redis.port}"}
        pods = RunningPods(release, directory, names)
        try:
            yield release, pods, directory
        finally:
            pods.kill()


def complete(pods: RunningPods, authority: Path) -> str:
    """Requests the continuation of a text from the gateway."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False  # the certificate has only names in a cluster
    with httpx.Client(verify=context, timeout=60) as client:
        answer = client.post(
            f"https://{pods.addresses['gateway']}:8000/v1/completions",
            json={"model": "tiny", "prompt": "def", "max_tokens": 12, "temperature": 0},
        )
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


@needs_redis
@pytest.mark.timeout(300)
def test_a_replica_with_tls_serves_loses_its_worker_and_drains(tiny_model: TinyModel) -> None:
    values = example("tls-cert-manager", model=_model(), worker=WORKER)
    with running(values, tiny_model) as (release, pods, directory):
        pods.start(release.pod("gateway"), wait=False)
        kvpool, worker, scheduler = pods.start(release.pod("replica"))
        (gateway,) = pods.containers["gateway"]
        for container in (kvpool, worker, scheduler, gateway):
            container.wait_for("readinessProbe")
            container.wait_for("livenessProbe")
        authority = directory / "secrets" / "demo-stepwell-gateway-public-tls" / "ca.crt"
        text = complete(pods, authority)
        worker.kill()
        worker.start()
        for container in (worker, scheduler, gateway):
            container.wait_for("readinessProbe")
        assert complete(pods, authority) == text
        assert [c.stop() for c in (gateway, scheduler, worker, kvpool)] == [0, 0, 0, 0]
