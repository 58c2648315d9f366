from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import replica, single, value_family, vllm
from services.scheduler.options.transfers.core.offloading_connector import OffloadingConnector


class TierCollector(Collector):
    """Collects the counts of the connector to the tier. Without a connector all values are 0."""

    def __init__(self, connector: OffloadingConnector | None) -> None:
        self._connector = connector

    def collect(self) -> Iterator[Metric]:
        if self._connector is None:
            queries = hits = blocks = held = stored = loaded = evicted = invalid = 0
        else:
            stats, index = self._connector.stats, self._connector.index
            queries, hits = stats.num_query_tokens, stats.num_hit_tokens
            blocks, held, evicted = index.num_blocks, len(index), index.num_evictions
            stored, loaded = stats.num_stored_blocks, stats.num_loaded_blocks
            invalid = stats.num_invalid_blocks
        yield single(vllm.EXTERNAL_PREFIX_CACHE_QUERIES, queries)
        yield single(vllm.EXTERNAL_PREFIX_CACHE_HITS, hits)
        yield single(replica.TIER_BLOCKS, blocks)
        yield single(replica.TIER_BLOCKS_HELD, held)
        transfers = value_family(replica.TIER_TRANSFERS)
        for kind, count in (
            ("stored", stored),
            ("loaded", loaded),
            ("evicted", evicted),
            ("invalid", invalid),
        ):
            transfers.add_metric([kind], count)
        yield transfers
