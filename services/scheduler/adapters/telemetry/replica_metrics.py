"""Serves the metrics of a replica's scheduler, pool and workers on one port."""

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from services.common.telemetry.exposition import Exposition, merged
from services.common.telemetry.metrics_servicer import collect_from


class ReplicaMetrics:
    """Merges the scheduler's metrics with the metrics of the pool and the workers at each scrape.
    Leaves out processes that do not reply. Must be created in a running event loop.

    `own` are the scheduler's metrics. `labels` are added to all series. Workers' series also get
    the label `rank`. Both are replaced when the workers have loaded the model and report its name.
    """

    def __init__(
        self,
        own: Exposition,
        pool: grpc.aio.Channel,
        workers: Sequence[grpc.aio.Channel],
        labels: Mapping[str, str],
    ) -> None:
        self.own = own
        self.labels = labels
        ranks = ((worker, {"rank": str(rank)}) for rank, worker in enumerate(workers))
        self._others: list[tuple[grpc.aio.Channel, dict[str, str]]] = [(pool, {}), *ranks]
        self._loop = asyncio.get_running_loop()

    async def collect(self, labels: Mapping[str, str], exemplars: bool) -> bytes:
        """The metrics as text, with `labels` added to all series, optionally with exemplars."""
        added = {**self.labels, **labels}
        own, *others = await asyncio.gather(
            asyncio.to_thread(self.own.render, added, exemplars=exemplars),
            *(
                collect_from(channel, {**added, **theirs}, exemplars=exemplars)
                for channel, theirs in self._others
            ),
        )
        return merged(text for text in (own, *others) if text is not None)

    def render(self, exemplars: bool) -> bytes:
        """The metrics as text. Must not be called in the thread of the event loop."""
        collecting = self.collect({}, exemplars)
        return asyncio.run_coroutine_threadsafe(collecting, self._loop).result()
