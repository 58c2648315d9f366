"""All services use TCP with mutual TLS. It does not change tokens, and no request is lost while
certificates and authorities are replaced.
"""

import asyncio
import dataclasses
import os
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from stepwell.gateway.v1 import gateway_pb2_grpc
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from benchmarks.soak.replicas import Replicas
from services.cli.processes.child import ChildSpec
from services.cli.processes.ports import claim_port
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings
from services.common.process.settings import env_prefix
from services.common.rpc.channel import open_channel
from tests.certificates import LOOPBACK, Authority, Files, SwappedDirectory
from tests.e2e.conftest import TinyModel
from tests.e2e.inference import generate, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.tiny import greedy
from tests.waiting import until

SERVICES = ("gateway", "scheduler", "kvpool", "worker")
ALLOWED = {"scheduler": ("gateway",), "kvpool": ("scheduler", "gateway"), "worker": ("scheduler",)}
NUM_STREAMS, NUM_TOKENS = 4, 40
SECONDS = 60.0


def identity(service: str) -> str:
    return f"spiffe://example.org/{service}"


class Secured:
    """Services on separate ports. Each has a certificate for its name and its address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.addresses = {
            service: f"127.0.0.1:{claim_port('127.0.0.1', 0, '--address')}"
            for service in (*SERVICES[1:], "vllm.grpc.engine")
        }
        self._secrets = {
            service: SwappedDirectory(directory / "tls" / service) for service in SERVICES
        }
        self.public = Files(directory / "tls" / "public")

    def issue(self, issuer: Authority, *trusted: Authority) -> None:
        """Replaces the certificate of every service, and the authorities that it trusts."""
        for service, secret in self._secrets.items():
            secret.swap(issuer.issue("127.0.0.1", identity(service)), *trusted)

    def files(self, service: str) -> Files:
        return self._secrets[service].files

    def rewire(self, spec: ChildSpec) -> ChildSpec:
        """The start command of a service with TLS at its TCP port. Health checks use a socket."""
        prefix = env_prefix(spec.name)
        settings = {
            name.upper(): str(path) for name, path in self.files(spec.name).settings().items()
        }
        if spec.name == "gateway":
            settings["SCHEDULERS"] = self.addresses["scheduler"]
            settings["TLS_CERT_FILE"] = str(self.public.cert)
            settings["TLS_KEY_FILE"] = str(self.public.key)
        else:
            settings["HEALTH_ADDRESS"] = spec.environ[f"{prefix}ADDRESS"]
            settings["ADDRESS"] = self.addresses[spec.name]
            settings["INTERNAL_TLS_ALLOWED_NAMES"] = ",".join(map(identity, ALLOWED[spec.name]))
        if spec.name == "scheduler":
            settings["KVPOOL"] = self.addresses["kvpool"]
            settings["WORKERS"] = self.addresses["worker"]
            settings["VLLM_GRPC_ADDRESS"] = self.addresses["vllm.grpc.engine"]
        environ = {prefix + name: value for name, value in settings.items()}
        return dataclasses.replace(spec, environ={**spec.environ, **environ})

    def num_replaced(self) -> int:
        """The number of certificate replacements in the services' logs."""
        log = (self._directory / "services.log").read_text()
        return log.count("certificate was replaced")


@asynccontextmanager
async def client(
    services: Replicas, secured: Secured
) -> AsyncIterator[gateway_pb2_grpc.InferenceStub]:
    credentials = grpc.ssl_channel_credentials(secured.public.ca.read_bytes())
    async with grpc.aio.secure_channel(services.grpc, credentials) as channel:
        yield gateway_pb2_grpc.InferenceStub(channel)


@pytest.fixture
def directory() -> AsyncIterator[Path]:
    # Sockets are in this directory, so its path must be short.
    with tempfile.TemporaryDirectory(prefix="stepwell-tls-") as path:
        yield Path(path)


async def test_streams_go_on_while_every_certificate_is_replaced(
    directory: Path, tiny_model: TinyModel
) -> None:
    old, new, public = Authority("old"), Authority("new"), Authority("public")
    secured = Secured(directory)
    secured.issue(old, old)
    secured.public.write(public.issue(*LOOPBACK), public)
    settings = UpSettings(
        model=tiny_model.directory, dtype="float32", num_threads=1, num_blocks=1000
    )
    expected = [greedy(tiny_model.model, prompt, NUM_TOKENS) for prompt in PROMPTS[:NUM_STREAMS]]
    done = asyncio.Event()
    num_answers = 0

    async def ask_on(stub: gateway_pb2_grpc.InferenceStub, number: int) -> None:
        nonlocal num_answers
        while not done.is_set():
            answer = await generate(stub, request(PROMPTS[number], NUM_TOKENS))
            assert answer.token_ids == expected[number]
            num_answers += 1

    async def answers_go_on() -> None:
        target = num_answers + 2 * NUM_STREAMS
        await until(lambda: num_answers >= target or asking.done())

    async with (
        Replicas(settings, directory, RestartPolicy(), rewire=secured.rewire) as services,
        client(services, secured) as stub,
    ):
        asking = asyncio.gather(*(ask_on(stub, number) for number in range(NUM_STREAMS)))
        try:
            await answers_go_on()
            for phase, (issuer, trusted) in enumerate(
                ((old, (old, new)), (new, (old, new)), (new, (new,))), start=1
            ):
                secured.issue(issuer, *trusted)
                await until(lambda phase=phase: secured.num_replaced() == phase * len(SERVICES))
                await answers_go_on()
            # New processes trust only the new authority, both as clients and as servers.
            for victim in ("worker", "scheduler"):
                num_ready = services.record.num_ready[victim]
                os.kill(services.pid(victim), signal.SIGKILL)
                await until(lambda v=victim, n=num_ready: services.record.num_ready[v] > n)
                await answers_go_on()
            await answers_https_with_a_new_certificate(services, secured, expected[0])
            await refuses_strangers(secured, old, new, directory)
            await serves_other_gateways(secured)
        finally:
            done.set()
            await asking


async def answers_https_with_a_new_certificate(
    services: Replicas, secured: Secured, expected: list[int]
) -> None:
    """Asserts that the HTTP API's certificate is new. The client trusts the new authority only."""
    num_replaced, new = secured.num_replaced(), Authority("new, public")
    secured.public.write(new.issue(*LOOPBACK), new)
    await until(lambda: secured.num_replaced() > num_replaced)
    context = ssl.create_default_context(cafile=secured.public.ca)
    body = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    url = f"https://{services.http}"
    async with httpx.AsyncClient(verify=context, base_url=url, timeout=SECONDS) as http:
        answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.json()["choices"][0]["token_ids"] == expected


async def refuses_strangers(
    secured: Secured, old: Authority, new: Authority, directory: Path
) -> None:
    """Asserts that the pool accepts the scheduler's certificate, and refuses the worker's
    certificate and certificates of the old authority.
    """
    former = Files(directory / "former").write(old.issue(identity("scheduler")), old, new)
    expected = {
        secured.files("scheduler"): None,
        secured.files("worker"): grpc.StatusCode.PERMISSION_DENIED,
        former: grpc.StatusCode.UNAVAILABLE,
    }
    for files, status in expected.items():
        async with open_channel(secured.addresses["kvpool"], files.tls()) as channel:
            try:
                await kvpool_pb2_grpc.KVPoolStub(channel).GetStats(kvpool_pb2.GetStatsRequest())
                met = None
            except grpc.aio.AioRpcError as error:
                met = error.code()
        assert met is status


async def serves_other_gateways(secured: Secured) -> None:
    """Asserts that vllm.grpc.engine uses the scheduler's certificate, and requires a client's."""
    vllm_engine_pb2 = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
    vllm_engine_pb2_grpc = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    gateway = secured.files("gateway").tls()
    async with open_channel(secured.addresses["vllm.grpc.engine"], gateway) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answer = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert answer.healthy
    async with open_channel(secured.addresses["vllm.grpc.engine"]) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
