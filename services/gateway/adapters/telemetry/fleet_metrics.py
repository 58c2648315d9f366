"""Prometheus metrics of the whole fleet: the metrics of this gateway and of every replica."""

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.exposition import Exposition, merged
from services.common.telemetry.metric_specs import edge, single
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.core.fleet.fleet import Fleet


class FleetCollector(Collector):
    """Counts of the replicas that this gateway knows, read at each scrape."""

    def __init__(self, fleet: Fleet, model_name: str, num_expected: int | None) -> None:
        """`num_expected` is the number of replicas that should be ready, or None if it was not
        set.
        """
        self._fleet = fleet
        self._model = model_name
        self._num_expected = num_expected
        self.num_silent = 0
        """Number of replicas that did not send their metrics in the last scrape."""

    def collect(self) -> Iterator[Metric]:
        """Called in another thread than the event loop's, so it must not use `Membership.ready`,
        which stores its result.
        """
        replicas = self._fleet.membership.replicas
        for name, value in (
            (edge.GATEWAY_REPLICAS, len(replicas)),
            (edge.GATEWAY_REPLICAS_READY, sum(replica.is_ready for replica in replicas)),
            (edge.GATEWAY_REPLICAS_EXPECTED, self._num_expected),
            (edge.GATEWAY_REPLICAS_SILENT, self.num_silent),
            (edge.GATEWAY_RESUBMISSIONS, self._fleet.num_resubmissions),
        ):
            if value is not None:
                yield single(name, value, self._model)


class FleetMetrics:
    """Collects the metrics of all replicas at each scrape, except replicas that do not respond."""

    def __init__(self, own: Exposition, collector: FleetCollector, links: SchedulerLinks) -> None:
        self._own = own
        self._collector = collector
        self._links = links
        self.others: Sequence[FleetMetrics] = ()
        """The metrics of the other models that this gateway serves, which `collect` adds."""

    async def collect(self, hidden_labels: Sequence[str] = (), *, exemplars: bool) -> bytes:
        """Returns the metrics as text. The label `replica` of a replica's series is the replica's
        address, because several replicas may have the same engine name. The gateway's own series
        with one of `hidden_labels` are omitted.
        """
        models = (self, *self.others)
        texts = await asyncio.gather(
            *(one.of_one_model(hidden_labels, exemplars=exemplars) for one in models)
        )
        return merged(text for of_model in texts for text in of_model)

    async def of_one_model(
        self, hidden_labels: Sequence[str], *, exemplars: bool
    ) -> Sequence[bytes]:
        """Returns the texts of this gateway and of the model's replicas."""
        links = self._links.all()
        texts = await asyncio.gather(
            *(link.metrics({"replica": link.address}, exemplars=exemplars) for link in links)
        )
        self._collector.num_silent = texts.count(None)
        own = await asyncio.to_thread(self._own.render, None, hidden_labels, exemplars=exemplars)
        return (own, *(text for text in texts if text is not None))
