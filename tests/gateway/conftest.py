"""Fixtures shared by the gateway's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, serving_with
from tests.gateway.tiny_tokenizer import write_tokenizer
from tests.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory named "tiny" that contains only a tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def served(model: Path) -> AsyncIterator[Serving]:
    async with serving(model, FakeScheduler()) as running:
        yield running


@pytest.fixture
async def hermes(calling: Path) -> AsyncIterator[Serving]:
    """A gateway that parses tools and reasoning, with the model of the module's `calling`."""
    async with serving_with(calling, "hermes", "qwen3") as served:
        yield served


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
