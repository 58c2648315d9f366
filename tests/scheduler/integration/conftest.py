"""Helpers shared by the scheduler's integration tests."""

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.serving_replica import Gateway, Replica, gateway_of


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    """A gateway whose session is open with the fixture `replica` of the test's module."""
    async with gateway_of(replica) as gateway:
        yield gateway
