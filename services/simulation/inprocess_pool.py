from collections.abc import Sequence

from services.common.pool.operations import Operation, Outcome
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from services.scheduler.core import ports
from services.scheduler.core.config import SchedulerConfig


class InProcessPool:
    """A scheduler's `KVPool` port, with a pool in the same process. Tests inspect `core`."""

    core: KVPool

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = pool_config_of(config)
        self.num_transactions = 0
        self.num_answers_left: int | None = None
        """The number of transactions before the pool raises PoolLost. None means no limit."""
        self.reopen()

    def reopen(self) -> None:
        """Replaces the pool by an empty pool without a limit of transactions."""
        self.num_answers_left = None
        self.core = KVPool(self._config)

    @property
    def num_skippable_blocks(self) -> int:
        """The number of free blocks, which limits how many equal steps the laboratory skips."""
        return self.core.num_free_blocks

    async def transact(
        self,
        operations: Sequence[Operation],
        traceparent: str = "",  # noqa: ARG002 - there are no spans in process
    ) -> Outcome:
        if self.num_answers_left is not None:
            if self.num_answers_left == 0:
                raise ports.PoolLost("the test made the kvpool unavailable at this transaction")
            self.num_answers_left -= 1
        self.num_transactions += 1
        return self.core.transact(operations)


def pool_config_of(config: SchedulerConfig) -> PoolConfig:
    return PoolConfig(
        num_blocks=config.num_blocks,
        groups=config.all_groups,
        enable_prefix_caching=config.enable_prefix_caching,
        drop_last_hit_block=config.drop_last_hit_block,
        prefix_match_unit=config.prefix_match_unit,
        prefix_cache_retention_interval=config.prefix_cache_retention_interval,
        max_model_len=config.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
    )
