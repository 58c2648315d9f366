from collections.abc import AsyncIterator

import pytest

from tests.scheduler.serving_replica import Gateway, Replica, gateway_of


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    """A gateway with a session (stream) at the replica of the module's fixture `replica`."""
    async with gateway_of(replica) as gateway:
        yield gateway
