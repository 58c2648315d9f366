"""A kvpool process writes its cached blocks to Redis, and ends if Redis refuses its password."""

import asyncio

from services.common.pool.kv_directory import block_keys, node_name
from services.common.rpc.channel import open_channel
from services.gateway.adapters.directory.redis_reader import ReaderTimes
from tests.directory.followed import Gateway
from tests.kvpool import wire
from tests.kvpool.integration.test_kvpool_process import (
    command,
    opened_speaker,
    pool_process,
    scrape,
)
from tests.kvpool.worked_examples import hashes
from tests.redis_servers import RedisServer, needs_redis, redis_server, until

pytestmark = needs_redis
FINGERPRINT = b"f" * 32
NODE = node_name("replica", 0)


async def test_a_gateway_matches_what_a_pool_caches_until_the_pool_ends(shared_server: RedisServer):
    gateway = Gateway(shared_server.url, FINGERPRINT, ReaderTimes(refresh_seconds=0.1))
    flags = ("--redis-url", shared_server.url, "--metrics-address", "127.0.0.1:0")
    async with pool_process(*flags) as (process, addresses):
        async with open_channel(addresses["serving"]) as channel:
            speaker = await opened_speaker(channel, fingerprint=FINGERPRINT)
            await speaker.transact(wire.admit(wire.admission(1, 12, path="abc")))
            await until(lambda: gateway.index.match(block_keys(hashes("abcd"))) == {NODE: 3})
            await speaker.transact(wire.release(1), wire.reset())
            await until(lambda: gateway.index.match(block_keys(hashes("abcd"))) == {})
            await speaker.transact(wire.admit(wire.admission(2, 8, path="xy")))
            await until(lambda: gateway.index.match(block_keys(hashes("xyz"))) == {NODE: 2})
            await speaker.end()
        lines = (await asyncio.to_thread(scrape, addresses["serving metrics"])).splitlines()
        assert "stepwell_cache_nodes_connected 1.0" in lines
        assert "stepwell_directory_lives_total 2.0" in lines
        process.terminate()
        # The pool removes its node from Redis before the node's lease expires.
        await until(lambda: gateway.index.view(NODE) is None, 2.0)
    await gateway.close()


async def test_a_wrong_password_ends_the_start(tmp_path):
    with redis_server(tmp_path, "--requirepass", "right") as server:
        url = f"redis://:wrong@127.0.0.1:{server.port}"
        process = await asyncio.create_subprocess_exec(
            *command("127.0.0.1:0", "--redis-url", url), stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    assert process.returncode == 2
    last = errors.decode().splitlines()[-1]
    assert last.startswith(f"stepwell kvpool: --redis-url {server.url}: Redis refuses user or pass")


async def test_a_pool_starts_while_redis_is_away(tmp_path):
    with redis_server(tmp_path) as server:
        server.kill()
        async with pool_process("--redis-url", server.url) as (_, addresses):
            server.start()
            gateway = Gateway(server.url, FINGERPRINT, ReaderTimes(refresh_seconds=0.1))
            async with open_channel(addresses["serving"]) as channel:
                speaker = await opened_speaker(channel, fingerprint=FINGERPRINT)
                await speaker.transact(wire.admit(wire.admission(1, 4, path="a")))
                await until(lambda: gateway.index.match(block_keys(hashes("a"))) == {NODE: 1})
                await speaker.end()
            await gateway.close()
