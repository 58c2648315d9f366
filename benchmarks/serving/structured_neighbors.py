"""Measures how much requests with a JSON schema slow down the other requests of their batch."""

import asyncio
from collections.abc import Mapping
from typing import Any

from benchmarks.common.clients import HttpClient
from benchmarks.common.load import Load, RequestTimes
from benchmarks.serving.targets import HttpTarget, Services

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
SAMPLED: Mapping[str, Any] = {"temperature": 1.0, "seed": 7}
CONSTRAINED: Mapping[str, Any] = {
    **SAMPLED,
    # The schema requires so many items that every answer reaches its maximum number of tokens.
    "structured_outputs": {"json": {"type": "array", "items": _ITEM, "minItems": 1000}},
}


class NeighborTarget(HttpTarget):
    """Runs a load over HTTP while an equal number of other requests run at the same time."""

    def __init__(self, services: Services, fields: Mapping[str, Any]) -> None:
        """`fields` are added to the bodies of the other requests."""
        super().__init__(services)
        self._fields = fields

    async def run(self, load: Load) -> list[RequestTimes]:
        """Runs a load to its end. Returns the times of the load's requests.

        If any request fails, one of the load or another one, all requests are cancelled, and the
        failure is raised in an ExceptionGroup.
        """
        client = HttpClient(self._services.http, self._fields)
        await client.open(load.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(self._repeat(client, load, number))
                    for number in range(load.concurrency)
                ]
                times = await super().run(load)
                for task in beside:
                    task.cancel()
            return times
        finally:
            await client.close()

    async def _repeat(self, client: HttpClient, load: Load, number: int) -> None:
        while True:
            await client.generate(load.prompt(-1 - number), load.output_tokens, lambda _: None)
