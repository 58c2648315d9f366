"""Alerts, evaluated by a real Prometheus that scrapes running services."""

import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.certificates import LOOPBACK, ONE_DAY, Authority, Files
from tests.e2e.conftest import TinyModel
from tests.e2e.prometheus_server import QUICK_SECONDS, Prometheus, needs_prometheus, prometheus
from tests.e2e.stack import Stack, wait_for
from tests.plain_http import http_post
from tests.redis_servers import RedisServer, free_port, needs_redis, redis_server

SECONDS = 60.0
PAUSE_SECONDS = 0.05
DAMAGED_TOKEN = 300


def complete(stack: Stack, **changes: object) -> int:
    """Sends a request for a few tokens. Returns the HTTP status, or 0 if there was no answer."""
    body = {"model": stack.model, "prompt": "one two three four", "max_tokens": 8, "seed": 1}
    try:
        answer = http_post(f"{stack.url}/v1/completions", json=body | changes, timeout=SECONDS)
    except httpx.TransportError:
        return 0
    return answer.status_code


@contextmanager
def load(stack: Stack, clients: int, **changes: object) -> Iterator[None]:
    """Runs clients inside the context. Each sends its next request soon after an answer."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(PAUSE_SECONDS):
            complete(stack, **changes)

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
        for one in asking:
            one.result()


@contextmanager
def paused(stack: Stack) -> Iterator[None]:
    """Pauses the services until the context ends, so that requests wait."""
    assert http_post(f"{stack.admin_url}/pause?mode=keep").is_success
    try:
        yield
    finally:
        assert http_post(f"{stack.admin_url}/resume").is_success


@contextmanager
def paused_often(stack: Stack) -> Iterator[None]:
    """Pauses the services repeatedly until the context ends, so that on any machine most requests
    wait for longer than the thresholds of the alert rules.
    """
    over = threading.Event()

    def pause() -> None:
        while not over.wait(PAUSE_SECONDS):
            with paused(stack):
                over.wait(2 * QUICK_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(pause)
        try:
            yield
        finally:
            over.set()
        pausing.result()


@contextmanager
def watched(stack: Stack, tmp_path: Path, **targets: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the stack's gateway and `targets`. At first no alert fires."""
    with prometheus(tmp_path, {"stepwell": stack.url} | targets) as server:
        wait_for(lambda: len(server.query("up == 1")) == 2 + len(targets), SECONDS)
        assert server.firing() <= {"StepwellPrefixIndexNotExact"}
        server.until_calm("StepwellPrefixIndexNotExact")
        yield server


@needs_prometheus
@needs_redis
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_fire_when_what_they_watch_breaks(tiny_model: TinyModel, tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    environ = {
        "STEPWELL_SCHEDULER_METRICS_ADDRESS": metrics,
        "STEPWELL_SCHEDULER_MAX_NUM_WAITING": "3",
    }
    flags = ("--num-blocks", "24", "--max-model-len", "256", "--admin-port", "0")
    with redis_server(tmp_path / "redis") as redis:
        stack = Stack(
            tiny_model.directory,
            *(*flags, "--redis-url", redis.url, "--liveness-timeout-seconds", "600"),
            environ=environ,
        )
        directory = tmp_path / "prometheus"
        directory.mkdir()
        try:
            with watched(stack, directory, **{"stepwell-replica": f"http://{metrics}"}) as server:
                _break_load(stack, server)
                _break_redis(redis, server)
                _break_processes(stack, server)
        finally:
            stack.close()


def _break_load(stack: Stack, server: Prometheus) -> None:
    """Sends more requests than fit into the KV cache and the queue, with repeated pauses."""
    with load(stack, 12, max_tokens=150, ignore_eos=True):
        server.until_firing("StepwellPreemptionsCostly", "StepwellRequestsRefused")
        server.until_firing("StepwellServerErrors", "StepwellKVCacheFull")
        with paused(stack):
            server.until_firing("StepwellPaused")
            assert "StepwellEngineStalled" not in server.firing()
        with paused_often(stack):
            server.until_firing("StepwellQueueTimeHigh", "StepwellTimeToFirstTokenHigh")


def _break_redis(redis: RedisServer, server: Prometheus) -> None:
    """Stops Redis while the alerts of the load end."""
    redis.stop()
    server.until_firing("StepwellPrefixIndexNotExact", "StepwellRedisUnreachable")
    redis.go_on()
    server.until_calm("StepwellPrefixIndexNotExact", "StepwellRedisUnreachable")
    server.until_calm("StepwellPaused", "StepwellRequestsRefused", "StepwellQueueTimeHigh")


def _break_processes(stack: Stack, server: Prometheus) -> None:
    """Stops the worker during a step, kills the pool three times, and stops the scheduler."""
    with load(stack, 1, max_tokens=200, ignore_eos=True):
        wait_for(lambda: stack.status()["num_running"] > 0, SECONDS)
        stack.hit("worker", signal.SIGSTOP)
        server.until_firing("StepwellEngineStalled")
        stack.hit("worker", signal.SIGCONT)
    server.until_calm("StepwellEngineStalled")
    for _ in range(3):
        killed = stack.pids()["kvpool"]
        stack.hit("kvpool")
        stack.wait_until_back("kvpool", killed)
        assert complete(stack) == httpx.codes.OK
    server.until_firing("StepwellRecoveries")
    stack.hit("scheduler", signal.SIGSTOP)
    try:
        server.until_firing(
            *("StepwellTargetDown", "StepwellNoReplicaReady", "StepwellReplicaNotReady"),
            "StepwellFewerReplicas",
        )
    finally:
        stack.hit("scheduler", signal.SIGCONT)


def damaged_copy(model: Path, directory: Path) -> Path:
    """Copies the model, with NaN in the embedding of DAMAGED_TOKEN. Logits after it are NaN."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][DAMAGED_TOKEN] = float("nan")
    save_file(weights, path, {"format": "pt"})
    return directory


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_fire_for_damaged_weights_a_missing_replica_and_a_certificate_that_soon_ends(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    authority = Authority()
    served = Files(tmp_path / "tls").write(authority.issue(*LOOPBACK, seconds=3600), authority)
    stack = Stack(
        damaged_copy(tiny_model.directory, tmp_path / "damaged"),
        *("--tls-cert-file", str(served.cert), "--tls-key-file", str(served.key)),
        environ={"STEPWELL_GATEWAY_EXPECTED_REPLICAS": "2"},
    )
    directory = tmp_path / "prometheus"
    directory.mkdir()
    try:
        with prometheus(directory, {"stepwell": stack.url}) as server:
            server.until_firing("StepwellCertificateExpires", "StepwellFewerReplicas")
            assert complete(stack) == httpx.codes.OK
            assert not {"StepwellRequestsFail", "StepwellCorruptedRequests"} & server.firing()
            with load(stack, 1, prompt=[5, DAMAGED_TOKEN]), load(stack, 1):
                server.until_firing("StepwellRequestsFail", "StepwellCorruptedRequests")
            served.key.write_text("no key")
            server.until_firing("StepwellCertificateReloadFails")
            served.write(authority.issue(*LOOPBACK, seconds=30 * ONE_DAY))
            server.until_calm("StepwellCertificateExpires")
            server.until_calm("StepwellRequestsFail", "StepwellCorruptedRequests")
            assert complete(stack) == httpx.codes.OK
    finally:
        stack.close()
