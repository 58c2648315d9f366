"""The metrics of a replica on one port: those of its scheduler, its pool and its workers."""

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from services.common.telemetry.exposition import Exposition, merged
from services.common.telemetry.metrics_servicer import collect_from


class ReplicaMetrics:
    """Asks pool and workers for theirs at each scrape. One that does not answer is left out. Made
    in a running loop.
    """

    def __init__(
        self,
        own: Exposition,
        pool: grpc.aio.Channel,
        workers: Sequence[grpc.aio.Channel],
        labels: Mapping[str, str],
    ) -> None:
        """All series get `labels`, and those of a worker its `rank`."""
        self._own = own
        self._labels = dict(labels)
        self._others = [
            (pool, self._labels),
            *((worker, {**self._labels, "rank": str(rank)}) for rank, worker in enumerate(workers)),
        ]
        self._loop = asyncio.get_running_loop()

    async def collect(self, labels: Mapping[str, str], exemplars: bool) -> bytes:
        """The text, with these labels on all series too, and with exemplars if they are wanted."""
        added = dict(labels)
        own, *others = await asyncio.gather(
            asyncio.to_thread(self._own.render, {**self._labels, **added}, exemplars=exemplars),
            *(
                collect_from(channel, {**theirs, **added}, exemplars=exemplars)
                for channel, theirs in self._others
            ),
        )
        return merged(text for text in (own, *others) if text is not None)

    def render(self, exemplars: bool) -> bytes:
        """The same, for another thread than the loop's."""
        collecting = self.collect({}, exemplars)
        return asyncio.run_coroutine_threadsafe(collecting, self._loop).result()
