"""The Redis implementation of the Directory (the index of cached KV blocks), on one server and on a
cluster of three nodes.
"""

from collections.abc import AsyncIterator

import pytest

from tests.directory.followed import FollowedDirectory, redis_directory
from tests.kvpool.directory_conformance import FINGERPRINT, DirectoryConformance
from tests.redis_servers import RedisServer, needs_redis

pytestmark = needs_redis


class TestRedisDirectory(DirectoryConformance):
    @pytest.fixture
    async def directory(self, shared_server: RedisServer) -> AsyncIterator[FollowedDirectory]:
        shared_server.ask("FLUSHALL")
        async with redis_directory(shared_server.url, FINGERPRINT) as (directory, _):
            yield directory


class TestRedisClusterDirectory(DirectoryConformance):
    @pytest.fixture
    async def directory(self, cluster: list[RedisServer]) -> AsyncIterator[FollowedDirectory]:
        for node in cluster:
            node.ask("FLUSHALL")
        async with redis_directory(cluster[0].url, FINGERPRINT) as (directory, _):
            yield directory
