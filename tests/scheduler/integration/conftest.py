from collections.abc import AsyncIterator

import pytest

from tests.scheduler.serving_replica import Gateway, Replica, gateway_of


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with gateway_of(replica) as gateway:
        yield gateway
