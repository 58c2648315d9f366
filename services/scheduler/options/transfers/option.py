"""The option that offloads KV blocks to the workers' tier, which is host memory."""

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import by_label, replica, single, vllm
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVRole
from services.scheduler.core.planning.replica_state import Connect
from services.scheduler.core.planning.transfers import LoggedAnswers
from services.scheduler.options.transfer_option import TransferOption
from services.scheduler.options.transfers.core.kv_connector import LoggedConnector
from services.scheduler.options.transfers.core.kv_transfers import KVTransfers
from services.scheduler.options.transfers.core.offloading_connector import OffloadingConnector
from services.scheduler.options.transfers.worker_messages import TierLoads


class TierCollector(Collector):
    """Collects the counters of the tier's KV connector, which are 0 without a connector."""

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
        moved = {"stored": stored, "loaded": loaded, "evicted": evicted, "invalid": invalid}
        yield by_label(replica.TIER_TRANSFERS, moved)


class OffloadedBlocks(TransferOption):
    """Transfers between the KV cache and the workers' tier, which may have no blocks."""

    messages = TierLoads

    def __init__(self, config: SchedulerConfig, num_tier_blocks: int) -> None:
        connector = OffloadingConnector(config, num_tier_blocks) if num_tier_blocks else None
        self._connector = connector
        self.connect = None if connector is None else partial(KVTransfers, connector)
        self.collectors = (TierCollector(connector),)

    @staticmethod
    def role(num_tier_blocks: int) -> KVRole | None:
        return KVRole.BOTH if num_tier_blocks else None

    @staticmethod
    def conflict(config: SchedulerConfig) -> str | None:
        if config.kv_role is None:
            return None
        if not config.enable_prefix_caching:
            return (
                "the workers keep offloaded blocks (kv_offloading_size), which are found by "
                "prefix caching: set enable_prefix_caching"
            )
        if any(group.block_size != config.hash_block_size for group in config.groups):
            return (
                "the workers keep offloaded blocks (kv_offloading_size), which are found by the "
                "hash at their end: leave prefix_match_unit unset, and blocks must have one size"
            )
        return None

    @staticmethod
    def replaying(answers: LoggedAnswers) -> Connect:
        return partial(KVTransfers, LoggedConnector(answers))

    def on_new_workers(self) -> None:
        if self._connector is not None:
            self._connector.reset_cache()
