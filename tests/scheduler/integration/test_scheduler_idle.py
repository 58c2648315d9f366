"""An idle replica keeps its connections open, although they carry only gRPC's keepalive pings. The
pool is not opened again, and the prefix cache is kept.
"""

import asyncio

import pytest

from services.common.rpc import channel
from tests.scheduler.serving_replica import gateway_of, serving_replica

PING_MILLIS = 520
"""Slightly more milliseconds than the shortest interval between pings that servers allow."""
IDLE_SECONDS = 4.0
"""Long enough for a server to end the connection if it did not allow pings without traffic."""
PROMPT = range(3, 43)
NUM_CACHED_TOKENS = 36


async def test_an_idle_replica_keeps_its_sessions_and_its_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = dict(channel.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": PING_MILLIS}
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", tuple(options.items()))
    async with serving_replica() as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPT)
        await gateway.finish(1)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await gateway.until_ended()

        await gateway.add(2, PROMPT)
        await gateway.finish(2)
        assert gateway.heard[2].tokens == gateway.heard[1].tokens
        assert gateway.heard[2].num_cached_tokens == NUM_CACHED_TOKENS
        assert len({step.generation for step in replica.worker.steps}) == 1
        assert gateway.error is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
