"""Serves the metrics of a replica's scheduler, pool and workers on one port."""

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from services.common.telemetry.exposition import Exposition, merged
from services.common.telemetry.metrics_servicer import collect_from


class ReplicaMetrics:
    """Merges the scheduler's metrics with the metrics of the pool and the workers at each scrape.
    Leaves out processes that do not reply. Must be created in a running event loop.
    """

    def __init__(
        self,
        own: Exposition,
        pool: grpc.aio.Channel,
        workers: Sequence[grpc.aio.Channel],
        labels: Mapping[str, str],
    ) -> None:
        """`labels` are added to all series. Workers' series also get the label `rank`."""
        self._own = own
        self._labels = dict(labels)
        self._others = [
            (pool, self._labels),
            *((worker, {**self._labels, "rank": str(rank)}) for rank, worker in enumerate(workers)),
        ]
        self._loop = asyncio.get_running_loop()

    async def collect(self, labels: Mapping[str, str], exemplars: bool) -> bytes:
        """The metrics as text, with `labels` added to all series, optionally with exemplars."""
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
        """The metrics as text. Must not be called in the thread of the event loop."""
        collecting = self.collect({}, exemplars)
        return asyncio.run_coroutine_threadsafe(collecting, self._loop).result()
