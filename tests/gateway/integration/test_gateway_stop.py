"""A gateway without requests ends at once."""

import asyncio
from pathlib import Path

from tests.gateway.serving import serving


async def stop_seconds(model: Path) -> float:
    """What stopping takes with an open connection that nothing is sent on."""
    async with serving(model) as served:
        assert (await served.http.get("/health")).status_code == 200
        loop = asyncio.get_running_loop()
        began = loop.time()
        await served.gateway.drain()
        return loop.time() - began


async def test_nothing_is_waited_for_if_nothing_runs(model: Path) -> None:
    """The quickest of five: the others may have had to wait for a processor."""
    assert min([await stop_seconds(model) for _ in range(5)]) < 0.08
