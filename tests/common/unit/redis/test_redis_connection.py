"""Calls of Redis can be cancelled, and end within their time limit, whatever the server does."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from services.common.redis.url import is_redis_url, without_secrets
from tests.redis_servers import SECONDS, RedisServer, needs_redis, redis_server

if needs_redis.args[0]:
    pytest.skip(needs_redis.kwargs["reason"], allow_module_level=True)

from services.common.process.settings import FileText, SettingError
from services.common.redis.client import why_unusable
from services.common.redis.connection import RedisConnection, RedisUnavailable


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def redis(server):
    redis = RedisConnection(server.url)
    yield redis
    await redis.close()


async def test_a_stopped_server_costs_a_call_half_a_second_at_most(server, redis):
    await redis.call(lambda client: client.set("key", b"value"))
    server.stop()
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        with pytest.raises(RedisUnavailable, match="no answer in time"):
            await redis.call(lambda client: client.get("key"))
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.8, "the others may have had to wait for a processor"
    server.go_on()
    assert await redis.call(lambda client: client.get("key")) == b"value"


async def test_a_reply_that_arrives_while_the_event_loop_is_busy_is_not_late(redis):
    await redis.call(lambda client: client.set("key", b"value"))
    for _ in range(5):
        calling = asyncio.create_task(redis.call(lambda client: client.get("key"), 0.05))
        await asyncio.sleep(0.0001)
        time.sleep(0.2)  # noqa: ASYNC251 - the event loop is busy
        assert await calling == b"value"


async def test_a_killed_server_is_found_again(server, redis):
    await redis.pipeline([("SET", "key", "value"), ("GET", "key")])
    server.kill()
    with pytest.raises(RedisUnavailable):
        await redis.call(lambda client: client.get("key"))
    await asyncio.to_thread(server.start)
    assert await redis.call(lambda client: client.get("key")) is None


async def test_a_command_that_fails_fails_its_pipeline(redis):
    with pytest.raises(RedisUnavailable, match="WRONGTYPE"):
        await redis.pipeline([("SET", "key", "value"), ("XLEN", "key")])


async def test_a_blocking_read_may_take_longer_than_a_call(server):
    tail = RedisConnection(server.url, blocking=True)
    answer = await tail.call(lambda client: client.xread({"log": "0-0"}, block=700), 5)
    assert not answer
    await tail.close()


async def test_a_cancelled_task_ends_wherever_its_call_is(redis):
    async def call_again_and_again() -> None:
        while True:
            await redis.call(lambda client: client.hgetall("nothing"))

    for number in range(100):
        task = asyncio.create_task(call_again_and_again())
        await asyncio.sleep(0.0002 * number)
        task.cancel()
        _, running = await asyncio.wait([task], timeout=60)
        assert not running


async def test_what_is_not_redis_is_refused_and_what_is_away_is_not():
    async def hang_up(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        redis = RedisConnection(f"redis://127.0.0.1:{port}")
        with pytest.raises(SettingError, match="the server at this address is not Redis"):
            await redis.require_usable()
        await redis.close()
    redis = RedisConnection(f"redis://127.0.0.1:{port}")
    await redis.require_usable()
    await redis.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:1/2",
        "rediss://u:p@h:1",
        "redis://:p@[::1]:6379",
        "unix:///run/r.sock",
    ],
)
def test_urls_of_redis_are_taken(url):
    assert is_redis_url(url) is None


@pytest.mark.parametrize(
    "url", ["", "h:1", "http://h", "redis://", "redis://h:x", "redis://[h", "unix:"]
)
def test_what_is_no_url_of_redis_is_refused_with_the_form(url):
    assert "redis://[user:password@]host:port" in is_redis_url(url)


def test_secrets_are_not_shown():
    assert without_secrets("rediss://u:p@h:1/2?password=p") == "rediss://h:1/2"


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(socket.EAI_NONAME, "the host name does not exist"), (socket.EAI_AGAIN, None)],
)
def test_a_name_server_that_does_not_answer_says_nothing_about_the_host(
    number: int, complaint: str | None
) -> None:
    failure = RedisUnavailable("Redis at redis://cache:6379: no connection")
    failure.__cause__ = socket.gaierror(number, "the lookup failed")
    assert why_unusable(failure) == complaint


async def test_a_url_in_a_file_is_read_again_when_redis_refuses_or_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "url"

    def write(password: str, server: RedisServer) -> None:
        file.write_text(f"redis://:{password}@127.0.0.1:{server.port}\n")

    async def until_answered() -> list[str]:
        refusals: list[str] = []
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    await connection.call(lambda client: client.ping())
                except RedisUnavailable as error:
                    refusals.append(str(error))
                else:
                    return refusals

    with redis_server(tmp_path / "a", "--requirepass", "first") as a:
        write("first", a)
        connection = RedisConnection(FileText.read(file))
        await until_answered()
        kill = ("CLIENT", "KILL", "TYPE", "normal")
        await connection.pipeline([("CONFIG", "SET", "requirepass", "second"), kill])
        await connection.close()
        with pytest.raises(RedisUnavailable, match="invalid username-password"):
            await connection.call(lambda client: client.ping())
        write("second", a)
        assert await until_answered() == []
        with redis_server(tmp_path / "b", "--requirepass", "second") as b:
            write("second", b)
            assert await until_answered() == [], "an open connection stays in use"
            a.kill()
            assert len(await until_answered()) <= 2
    await connection.close()
