"""gRPC over TLS: which clients a server accepts, and how certificates are replaced."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common import errors
from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import SettingError
from services.common.rpc.channel import open_channel
from services.common.rpc.server import READINESS, GrpcServer
from services.common.rpc.status import from_peer
from services.common.tls.metrics import TlsCollector
from services.common.tls.settings import tls_of
from services.kvpool.settings import KVPoolSettings
from tests.certificates import LOOPBACK, Authority, Files
from tests.scheduler.cuttable_proxy import CuttableProxy

pytest.importorskip("cryptography")

from services.common.tls.credentials import Tls

SPIFFE_ID = "spiffe://example.org/scheduler"
SECONDS = 60.0
AT_ONCE = (
    "the kvpool ends each connection at once: the server may require TLS or another client "
    "certificate, or a proxy in between has no server"
)


class Numbers(kvpool_pb2_grpc.KVPoolServicer):
    """A pool that answers GetStats at once, and WatchEvents with a stream of numbers."""

    async def GetStats(self, request: object, context: object) -> kvpool_pb2.GetStatsResponse:  # noqa: ARG002, N802
        return kvpool_pb2.GetStatsResponse(pools=[kvpool_pb2.PoolStats(pool_id="numbers")])

    async def WatchEvents(self, request: object, context: object) -> Any:  # noqa: ARG002, N802
        for number in range(1_000_000):
            yield kvpool_pb2.WatchEventsResponse(sequence=number)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(tls: Tls | None, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serves `Numbers` until the `async with` block ends. Yields the address."""
    server = GrpcServer(tls=tls)
    name = kvpool_pb2.DESCRIPTOR.services_by_name["KVPool"].full_name
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, Numbers(), name)
    try:
        yield await server.start(address)
    finally:
        await server.drain(0)


async def ask(channel: grpc.aio.Channel) -> str:
    """Calls GetStats. Raises the same errors as a service that calls another service."""
    stub = kvpool_pb2_grpc.KVPoolStub(channel)
    try:
        answer = await stub.GetStats(kvpool_pb2.GetStatsRequest(), timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        raise from_peer("the kvpool", error) from error
    return answer.pools[0].pool_id


async def refused(address: str, tls: Tls | None) -> str:
    """The message of the error that a refused client raises."""
    async with open_channel(address, tls) as channel:
        with pytest.raises(errors.Unavailable) as caught:
            await ask(channel)
        return str(caught.value)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def own(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a certificate for this machine, valid for servers and clients."""
    issued = authority.issue(*LOOPBACK, SPIFFE_ID)
    return Files(tmp_path_factory.mktemp("own")).write(issued, authority)


async def test_services_of_one_authority_serve_each_other(own: Files) -> None:
    async with serving(own.tls()) as address, open_channel(address, own.tls()) as channel:
        assert await ask(channel) == "numbers"


async def test_a_client_of_another_authority_is_refused(
    own: Files, authority: Authority, tmp_path: Path
) -> None:
    foreign = Files(tmp_path).write(Authority("another").issue(*LOOPBACK), authority)
    async with serving(own.tls()) as address:
        why = await refused(address, foreign.tls())
    assert why.startswith("the kvpool ends each connection at once: the server may require")
    assert why.endswith("another client certificate, or a proxy in between has no server")


async def test_a_client_without_a_certificate_is_refused(own: Files) -> None:
    credentials = grpc.ssl_channel_credentials(own.ca.read_bytes())
    async with (
        serving(own.tls()) as address,
        grpc.aio.secure_channel(address, credentials) as channel,
    ):
        with pytest.raises(errors.Unavailable):
            await ask(channel)


async def test_a_client_without_tls_is_refused(own: Files) -> None:
    async with serving(own.tls()) as address:
        why = await refused(address, None)
    assert why == AT_ONCE


async def test_a_proxy_to_nothing_looks_like_a_service_that_refuses(free_port: int) -> None:
    proxy = CuttableProxy(f"127.0.0.1:{free_port}")
    why = await refused(await proxy.start(), None)
    await proxy.close()
    assert why == AT_ONCE


async def test_a_server_without_tls_is_not_called(own: Files) -> None:
    async with serving(None) as address:
        assert await refused(address, own.tls()) == "the kvpool does not speak TLS"


async def test_a_server_of_another_authority_is_not_called(own: Files, tmp_path: Path) -> None:
    other = Authority("another")
    server = Files(tmp_path).write(other.issue(*LOOPBACK), other)
    async with serving(server.tls()) as address:
        why = await refused(address, own.tls())
    assert why == "the kvpool presents a certificate that this service does not trust"


async def test_a_server_of_another_name_is_not_called(
    own: Files, authority: Authority, tmp_path: Path
) -> None:
    server = Files(tmp_path).write(authority.issue("pool.example"), authority)
    async with serving(server.tls()) as address:
        why = await refused(address, own.tls())
        assert why == "the kvpool presents a certificate whose names do not include its address"
        async with open_channel(address, own.tls(server_name="pool.example")) as channel:
            assert await ask(channel) == "numbers"


async def test_a_certificate_that_expired_while_it_was_used_is_refused(
    own: Files, authority: Authority, tmp_path: Path
) -> None:
    client = Files(tmp_path).write(authority.issue(*LOOPBACK, seconds=1.0), authority).tls()
    await asyncio.sleep(max(0.0, client.watch.seconds_left + 1.0))
    async with serving(own.tls()) as address:
        assert "the server may require" in await refused(address, client)
    async with serving(client) as address:
        why = await refused(address, own.tls())
    assert why == "the kvpool presents a certificate that has expired"


@pytest.mark.parametrize("allowed", ["localhost", "127.0.0.1", SPIFFE_ID])
async def test_a_caller_is_known_by_each_of_its_names(own: Files, allowed: str) -> None:
    async with (
        serving(own.tls(allowed, "unused.example")) as address,
        open_channel(address, own.tls()) as channel,
    ):
        assert await ask(channel) == "numbers"


@pytest.mark.parametrize("method", ["unary", "stream"])
async def test_a_caller_of_another_name_may_not_call(own: Files, method: str) -> None:
    async with (
        serving(own.tls("spiffe://example.org/gateway")) as address,
        open_channel(address, own.tls()) as channel,
    ):
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        call = (
            stub.GetStats(kvpool_pb2.GetStatsRequest())
            if method == "unary"
            else stub.WatchEvents(kvpool_pb2.WatchEventsRequest()).read()
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details() == (
        f"certificates for 127.0.0.1, localhost, {SPIFFE_ID} may not call this service"
    )


async def test_sockets_of_the_machine_stay_as_they_are(own: Files) -> None:
    with tempfile.TemporaryDirectory(prefix="stepwell-") as directory:
        address = f"unix:{directory}/pool.sock"
        async with serving(own.tls("nobody.example"), address):
            for tls in (None, own.tls()):
                async with open_channel(address, tls) as channel:
                    assert await ask(channel) == "numbers"


async def test_probes_need_no_certificate_at_the_address_for_health(
    own: Files, free_port: int
) -> None:
    server, address = GrpcServer(tls=own.tls()), f"127.0.0.1:{free_port}"
    await server.start("127.0.0.1:0", address)
    try:
        async with open_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=READINESS)
            stub = health_pb2_grpc.HealthStub(channel)
            statuses = []
            for ready in (False, True):
                await server.set_ready(ready)
                statuses.append((await stub.Check(request)).status)
            assert statuses == [2, 1], "NOT_SERVING, SERVING"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await kvpool_pb2_grpc.KVPoolStub(channel).GetStats(kvpool_pb2.GetStatsRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.drain(0)


class Stream:
    """A call of WatchEvents. Reads numbers until `stop` is called."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.num_read = 0
        self._task = asyncio.create_task(self._read(kvpool_pb2_grpc.KVPoolStub(channel)))

    async def _read(self, stub: Any) -> None:
        async for message in stub.WatchEvents(kvpool_pb2.WatchEventsRequest()):
            assert message.sequence == self.num_read
            self.num_read += 1

    async def goes_on(self) -> None:
        """Waits until three more numbers are read. If the stream has ended, raises its error."""
        target = self.num_read + 3
        async with asyncio.timeout(SECONDS):
            while self.num_read < target:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_certificates_and_authority_are_replaced_while_streams_run(tmp_path: Path) -> None:
    """An operator first makes all services trust both authorities, then replaces the certificates,
    and finally removes the old authority.
    """
    old, new = Authority("old"), Authority("new")
    server_files = Files(tmp_path / "server").write(old.issue(*LOOPBACK), old)
    client_files = Files(tmp_path / "client").write(old.issue(*LOOPBACK), old)
    server, client = server_files.tls(), client_files.tls()
    old_client = Files(tmp_path / "old").write(old.issue(*LOOPBACK), old, new).tls()
    async with serving(server) as address, open_channel(address, client) as channel:
        streams = [Stream(channel) for _ in range(4)]

        async def replaced(issuer: Authority, *trusted: Authority) -> None:
            for files, tls in ((server_files, server), (client_files, client)):
                before = tls.watch.current
                files.write(issuer.issue(*LOOPBACK), *trusted)
                tls.watch.look()
                assert tls.watch.current is not before
                assert await ask(channel) == "numbers"
            for stream in streams:
                await stream.goes_on()

        await replaced(old, old, new)
        async with open_channel(address, old_client) as before:
            assert await ask(before) == "numbers"
        await replaced(new, old, new)
        await replaced(new, new)
        assert "the server may require" in await refused(address, old_client)
        for stream in streams:
            await stream.stop()
        assert await ask(channel) == "numbers"


async def test_the_connection_of_an_old_certificate_closes_with_its_last_call(
    own: Files, authority: Authority, tmp_path: Path
) -> None:
    files = Files(tmp_path).write(authority.issue(*LOOPBACK), authority)
    client = files.tls()
    async with serving(own.tls()) as address, open_channel(address, client) as channel:
        first = channel.current()
        stream = Stream(channel)
        await stream.goes_on()
        files.write(authority.issue(*LOOPBACK))
        client.watch.look()
        assert await ask(channel) == "numbers"
        assert channel.current() is not first
        await stream.goes_on()
        assert first.get_state() is grpc.ChannelConnectivity.READY
        await stream.stop()
        async with asyncio.timeout(SECONDS):
            while first.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_closing_a_channel_ends_the_calls_of_every_certificate(
    own: Files, authority: Authority, tmp_path: Path
) -> None:
    files = Files(tmp_path).write(authority.issue(*LOOPBACK), authority)
    client = files.tls()
    async with serving(own.tls()) as address:
        channel = open_channel(address, client)
        streams = []
        for _ in range(2):
            streams.append(Stream(channel))
            await streams[-1].goes_on()
            files.write(authority.issue(*LOOPBACK))
            client.watch.look()
        async with asyncio.timeout(SECONDS):
            await channel.close()
        for stream in streams:
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await stream.goes_on()


def metric(tls: Tls) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(TlsCollector(tls, None))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics_say_how_long_a_certificate_is_valid(authority: Authority, tmp_path: Path) -> None:
    tls = Files(tmp_path).write(authority.issue(*LOOPBACK, seconds=1000), authority).tls()
    (tmp_path / "tls.key").write_text("damaged")
    tls.watch.look()
    values = metric(tls)
    label = '{certificate="internal"}'
    assert 900 < values.pop(f"stepwell_tls_certificate_seconds_left{label}") <= 1000
    assert values == {
        f"stepwell_tls_reloads_total{label}": 0,
        f"stepwell_tls_files_usable{label}": 0,
    }


def test_without_certificates_there_is_no_tls() -> None:
    with tls_of(ServiceSettings(address="127.0.0.1:0")) as tls:
        assert tls is None


def test_the_settings_of_a_service_become_its_tls(own: Files) -> None:
    settings = KVPoolSettings(
        **own.settings(), internal_tls_allowed_names=("scheduler.example", SPIFFE_ID)
    )
    with tls_of(settings) as tls:
        assert tls is not None
        assert tls.allowed_names == {"scheduler.example", SPIFFE_ID}
        assert tls.watch.current.pem.ca == own.ca.read_bytes()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("cert",), "--internal-tls-cert-file needs --internal-tls-key-file and --internal-tls-ca"),
        (("ca",), "--internal-tls-ca-file needs --internal-tls-cert-file and --internal-tls-key"),
        (("cert", "key"), "--internal-tls-cert-file needs --internal-tls-ca-file"),
    ],
)
def test_a_part_of_the_settings_is_refused(
    own: Files, given: tuple[str, ...], sentence: str
) -> None:
    every = own.settings()
    part = {f"internal_tls_{name}_file": every[f"internal_tls_{name}_file"] for name in given}
    with (
        pytest.raises(SettingError, match=sentence),
        tls_of(ServiceSettings(address="127.0.0.1:0", **part)),
    ):
        pass


def test_names_that_would_allow_no_caller_are_refused() -> None:
    settings = KVPoolSettings(internal_tls_allowed_names=("scheduler.example",))
    sentence = "--internal-tls-allowed-names needs --internal-tls-cert-file"
    with pytest.raises(SettingError, match=sentence), tls_of(settings):
        pass
