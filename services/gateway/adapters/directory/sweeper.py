"""Removes void entries from the index in small parts."""

import asyncio

from services.gateway.core.prefix_index.prefix_index import PrefixIndex

_IDLE_SECONDS = 0.1
_BETWEEN_PARTS_SECONDS = 0.002


async def sweep(index: PrefixIndex) -> None:
    """Sweeps until cancelled. A part takes about a millisecond in an index of a million blocks."""
    while True:
        more = index.sweep()
        await asyncio.sleep(_BETWEEN_PARTS_SECONDS if more else _IDLE_SECONDS)
