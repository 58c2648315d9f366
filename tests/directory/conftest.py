"""Redis servers for tests of the directory, which tells gateways the blocks that pools cache."""

from collections.abc import Iterator

import pytest

from tests.redis_servers import RedisServer, redis_cluster, redis_server


@pytest.fixture
def server(tmp_path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory) -> Iterator[RedisServer]:
    """A Redis server that all tests of a module share. It is emptied for each test."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[list[RedisServer]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes
