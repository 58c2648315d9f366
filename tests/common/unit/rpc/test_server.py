"""The gRPC server that all services use, with health checks, reflection, metrics and drain."""

import asyncio
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.errors import ResourceExhausted, Unavailable
from services.common.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from services.common.rpc.local_stream import streams_path
from services.common.rpc.server import LIVENESS, READINESS, GrpcServer
from services.common.rpc.status import from_rpc_error
from services.common.telemetry.exposition import CONTENT_TYPE, OPEN_METRICS_TYPE, Exposition
from services.common.telemetry.metrics import serving_metrics

NAME = "stepwell.kvpool.v1.KVPool"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SECONDS = 60.0


class Echo(kvpool_pb2_grpc.KVPoolServicer):
    """A pool whose method MatchPrefix answers only after the test has set `going`."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.begun = asyncio.Event()

    async def GetStats(self, request: object, context: object) -> kvpool_pb2.GetStatsResponse:  # noqa: ARG002, N802
        return kvpool_pb2.GetStatsResponse(pools=[kvpool_pb2.PoolStats(pool_id="echo")])

    async def MatchPrefix(self, request: object, context: object) -> kvpool_pb2.MatchPrefixResponse:  # noqa: ARG002, N802
        self.begun.set()
        await self.going.wait()
        return kvpool_pb2.MatchPrefixResponse()

    async def WatchEvents(self, request: object, context: object) -> AsyncIterator[object]:  # noqa: ARG002, N802
        yield kvpool_pb2.WatchEventsResponse()

    async def Transact(self, requests: AsyncIterator[object], context: object) -> object:  # noqa: ARG002, N802
        async for _ in requests:
            yield kvpool_pb2.TransactResponse()


class Served:
    def __init__(self, server: GrpcServer, echo: Echo, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.echo = echo
        self.channel = channel
        self.stub = kvpool_pb2_grpc.KVPoolStub(channel)

    async def health(self, service: str = "") -> int:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
        status: int = answer.status
        return status


def make_server(echo: Echo, **options: int) -> GrpcServer:
    server = GrpcServer(**options)
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, echo, NAME)
    return server


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    echo = Echo()
    server = make_server(echo)
    address = await server.start("127.0.0.1:0")
    assert not address.endswith(":0")
    async with open_channel(address) as channel:
        yield Served(server, echo, channel)
    await server.drain(0)


async def test_readiness_is_what_the_service_says_and_liveness_holds_from_the_start(
    served: Served,
) -> None:
    for name in (READINESS, NAME):
        assert await served.health(name) == NOT_SERVING
    assert await served.health(LIVENESS) == SERVING
    await served.server.set_ready(True)
    for name in (LIVENESS, READINESS, NAME):
        assert await served.health(name) == SERVING
    await served.server.set_live(False)
    assert await served.health(LIVENESS) == NOT_SERVING
    assert await served.health(READINESS) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await served.health("unknown")
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_what_is_served(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    answer = await call.read()
    listed = {service.name for service in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= listed
    call.cancel()


@pytest.mark.parametrize("method", ["GetStats", "WatchEvents", "Transact"])
async def test_a_message_that_cannot_be_decoded_is_the_callers_fault(
    served: Served, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/{NAME}/{method}"
    if method == "GetStats":
        call = served.channel.unary_unary(path)(b"\xff")
    elif method == "WatchEvents":
        call = served.channel.unary_stream(path)(b"\xff").read()
    else:
        stream = served.channel.stream_stream(path)()
        await stream.write(b"")
        assert await stream.read() == kvpool_pb2.TransactResponse().SerializeToString()
        await stream.write(b"\xff")
        call = stream.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == f"a message to {path} cannot be decoded"
    assert not caplog.records


async def test_a_drain_turns_not_ready_lets_calls_end_and_takes_no_new_ones(served: Served) -> None:
    await served.server.set_ready(True)
    watched = health_pb2.HealthCheckRequest(service=READINESS)
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(watched)
    assert (await watch.read()).status == SERVING
    running = asyncio.ensure_future(served.stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest()))
    async with asyncio.timeout(SECONDS):
        await served.echo.begun.wait()
        draining = asyncio.create_task(served.server.drain(SECONDS))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await served.server.set_ready(True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.GetStats(kvpool_pb2.GetStatsRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        served.echo.going.set()
        assert await running == kvpool_pb2.MatchPrefixResponse()
        await draining


async def test_what_does_not_end_within_the_grace_is_cut_off(served: Served) -> None:
    running = asyncio.ensure_future(served.stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest()))
    async with asyncio.timeout(SECONDS):
        await served.echo.begun.wait()
        await served.server.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_a_taken_port_is_an_error_at_once(served: Served) -> None:
    second, third = make_server(Echo()), make_server(Echo())
    address = await second.start("127.0.0.1:0")
    with pytest.raises(Unavailable, match=f"cannot listen on {address}: Address already in use"):
        await third.start(address)
    await second.drain(0)
    assert served.server is not second


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host!:1", "Name or service not known"),
        ("192.0.2.1:1", "Cannot assign requested address"),
        ("unix:/no/such/directory/s.sock", "No such file or directory"),
    ],
)
async def test_an_address_that_cannot_be_bound_has_its_reason(address: str, reason: str) -> None:
    with pytest.raises(Unavailable, match=f"cannot listen on {address}: {reason}"):
        await make_server(Echo()).start(address)


async def test_a_socket_in_the_file_system_is_served_too() -> None:
    with tempfile.TemporaryDirectory(prefix="sw") as directory:
        server = make_server(Echo())
        address = await server.start(f"unix:{Path(directory) / 's'}")
        assert address == f"unix:{Path(directory) / 's'}"
        async with open_channel(address) as channel:
            answer = await kvpool_pb2_grpc.KVPoolStub(channel).GetStats(
                kvpool_pb2.GetStatsRequest()
            )
        assert answer.pools[0].pool_id == "echo"
        await server.drain(0)


def sockets_in(directory: Path) -> tuple[Path, Path]:
    """The server's two sockets at the path "s": one for gRPC and one for local streams."""
    return directory / "s", Path(streams_path(f"{directory}/s"))


async def test_a_socket_that_a_process_listens_at_is_taken(tmp_path: Path) -> None:
    address, paths = f"unix:{tmp_path}/s", sockets_in(tmp_path)
    first, second = (GrpcServer(has_local_streams=True) for _ in range(2))
    await first.start(address)
    with pytest.raises(
        Unavailable, match=f"cannot listen on {address}: another process listens there"
    ):
        await second.start(address)
    await second.drain(0)
    assert all(path.is_socket() for path in paths)
    await first.drain(0)


async def test_a_server_that_drains_leaves_the_sockets_of_the_next_one(tmp_path: Path) -> None:
    echo, address, paths = Echo(), f"unix:{tmp_path}/s", sockets_in(tmp_path)
    first, second = make_server(echo), GrpcServer(has_local_streams=True)
    async with open_channel(await first.start(address)) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        running = asyncio.ensure_future(stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest()))
        await asyncio.wait_for(echo.begun.wait(), SECONDS)
        draining = asyncio.create_task(first.drain(SECONDS))
        for _ in range(1000):
            if not paths[0].exists():
                break
            await asyncio.sleep(0.01)
        await second.start(address)
        echo.going.set()
        await running
        await draining
    assert all(path.is_socket() for path in paths)
    await second.drain(0)


async def test_the_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    for path in sockets_in(tmp_path):
        with socket.socket(socket.AF_UNIX) as abandoned:
            abandoned.bind(str(path))
    server = GrpcServer(has_local_streams=True)
    assert await server.start(f"unix:{tmp_path}/s") == f"unix:{tmp_path}/s"
    await server.drain(0)


async def test_further_calls_than_are_served_at_once_are_refused() -> None:
    echo = Echo()
    server = make_server(echo, max_concurrent_rpcs=1)
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        running = asyncio.ensure_future(stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest()))
        async with asyncio.timeout(SECONDS):
            await echo.begun.wait()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetStats(kvpool_pb2.GetStatsRequest())
            assert isinstance(from_rpc_error(refused.value), ResourceExhausted)
            echo.going.set()
            await running
    await server.drain(0)


async def test_large_messages_pass_and_larger_ones_are_refused(served: Served) -> None:
    served.echo.going.set()
    await served.stub.MatchPrefix(
        kvpool_pb2.MatchPrefixRequest(hashes=bytes(8 * 2**20)), timeout=SECONDS
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.MatchPrefix(
            kvpool_pb2.MatchPrefixRequest(hashes=bytes(MAX_MESSAGE_BYTES + 1)), timeout=SECONDS
        )
    assert isinstance(from_rpc_error(refused.value), ResourceExhausted)


class OneGauge(Collector):
    """A collector of one gauge with the value 42."""

    def __init__(self, name: str = "stepwell_answer") -> None:
        self._name = name

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(self._name, "The answer.", value=42)]


def rendered(exemplars: bool) -> bytes:
    return Exposition("test", [OneGauge("vllm:answer")]).render(exemplars=exemplars)


# The Accept headers that Prometheus 2.42 and 3 send.
ACCEPT = {
    "2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
}


@pytest.mark.parametrize("version", ACCEPT)
def test_a_scraper_that_would_rather_have_openmetrics_gets_vllms_names(
    version: str, free_port: int
) -> None:
    with serving_metrics(rendered, f"127.0.0.1:{free_port}"):
        response = httpx.get(
            f"http://127.0.0.1:{free_port}/metrics", headers={"Accept": ACCEPT[version]}
        )
    assert response.headers["content-type"] == OPEN_METRICS_TYPE
    assert response.text.startswith(
        "# HELP vllm:answer The answer.\n# TYPE vllm:answer gauge\nvllm:answer 42.0\n"
    )
    assert response.text.endswith("# EOF\n")


def test_metrics_are_served_while_the_block_lasts(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/metrics"
    with serving_metrics(rendered, f"127.0.0.1:{free_port}"):
        response = httpx.get(url)
        assert "vllm:answer 42.0" in response.text
        assert response.headers["content-type"] == CONTENT_TYPE
        with (
            pytest.raises(Unavailable, match=f"cannot serve metrics on 127.0.0.1:{free_port}"),
            serving_metrics(rendered, f"127.0.0.1:{free_port}"),
        ):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_without_an_address_no_metrics_are_served() -> None:
    with serving_metrics(rendered, None):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_only_what_is_wrong_with_metrics_is_logged(
    free_port: int,
    *,
    fails: bool,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked, answering = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def render(_exemplars: bool) -> bytes:
        threads.append(threading.current_thread())
        asked.set()
        assert answering.wait(SECONDS)
        if fails:
            raise ValueError("no metrics")
        return bytes(2**20)

    with serving_metrics(render, f"127.0.0.1:{free_port}"):
        with socket.create_connection(("127.0.0.1", free_port)) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert asked.wait(SECONDS)
            # Closes the connection with a reset, before the answer is sent.
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        answering.set()
        threads[0].join(SECONDS)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == (
        ["metrics cannot be served"] if fails else []
    )
    assert capfd.readouterr().err == ""
