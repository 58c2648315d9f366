"""Pool and workers as a pair: found, matched, opened as one generation, and opened again."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.errors import FailedPrecondition, InvalidArgument, StepwellError
from services.common.kv_cache_groups import AttentionType, GroupSpec
from services.common.lease import Taken
from services.scheduler.adapters.pool_client import PoolClient
from services.scheduler.adapters.worker_client import WorkerGroup
from services.scheduler.core.ports import PoolLost, WorkersLost

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 0.25
QUIET_SECONDS = 5.0

_ATTENTION_TYPES = {
    common_pb2.ATTENTION_TYPE_FULL: AttentionType.FULL,
    common_pb2.ATTENTION_TYPE_SLIDING_WINDOW: AttentionType.SLIDING_WINDOW,
    common_pb2.ATTENTION_TYPE_CHUNKED_LOCAL: AttentionType.CHUNKED_LOCAL,
    common_pb2.ATTENTION_TYPE_STATE_SPACE: AttentionType.STATE_SPACE,
}


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What the ranks have in common, and the least of what they differ in."""

    description: worker_pb2.DescribeResponse
    num_blocks: int

    @property
    def block_size(self) -> int:
        """Tokens per block, of every group."""
        return self.description.groups[0].block_size

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The groups of layers that share the pool."""
        return tuple(
            GroupSpec(
                _ATTENTION_TYPES[group.attention_type],
                group.block_size,
                group.window,
                group.num_layers,
            )
            for group in self.description.groups
        )


class ReplicaClient:
    """A `Replica` over pool and workers. What they serve may not change while this process lives,
    for requests are checked against it at the door: `reopen` raises FailedPrecondition if it does.
    What the pool refuses for good is raised as InvalidArgument.
    """

    def __init__(
        self, pool: PoolClient, workers: WorkerGroup, *, enable_prefix_caching: bool
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._enable_prefix_caching = enable_prefix_caching
        self._shape: ReplicaShape | None = None

    async def open(self) -> ReplicaShape:
        """Waits for pool and workers as long as it takes, and opens them as a new generation. Says
        what it waits for once that is longer than they usually take to start, or at once where
        they belong to another scheduler.
        """
        delay, complaint = FIRST_RETRY_SECONDS, ""
        loop = asyncio.get_running_loop()
        quiet_until = loop.time() + QUIET_SECONDS
        while True:
            try:
                return await self._try()
            except StepwellError as error:
                is_taken = error.error_reason == Taken.reason
                if isinstance(error, FailedPrecondition | InvalidArgument) and not is_taken:
                    raise
                if error.message != complaint and (is_taken or loop.time() >= quiet_until):
                    complaint = error.message
                    logger.info("waiting for pool and workers: %s", complaint)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)

    def watch(self, on_lost: Callable[[PoolLost | WorkersLost], None]) -> None:
        """Tells `on_lost` when pool or workers go away, also where nothing is asked of them."""
        self._pool.on_lost = on_lost
        self._workers.on_lost = on_lost

    async def reopen(self) -> None:
        await self.open()

    def close(self) -> None:
        """Ends all streams."""
        self._workers.close()
        self._pool.close()

    async def _try(self) -> ReplicaShape:
        ranks = await self._workers.describe()
        shape = _shape(ranks)
        if self._shape is not None:
            _require_same(self._shape, shape)
            # The scheduler goes on counting the blocks that it was built for.
            shape = replace(shape, num_blocks=self._shape.num_blocks)
        generation = await self._pool.open(
            shape.num_blocks,
            shape.description.groups,
            shape.description.fingerprint,
            enable_prefix_caching=self._enable_prefix_caching,
            drop_last_hit_block=shape.description.drop_last_hit_block,
            seen_generation=max(rank.seen_generation for rank in ranks),
        )
        await self._workers.open(generation)
        self._shape = shape
        logger.info(
            "serving %s: %d blocks of %d tokens, generation %d",
            shape.description.model_name,
            shape.num_blocks,
            shape.block_size,
            generation,
        )
        return shape


def _shape(ranks: list[worker_pb2.DescribeResponse]) -> ReplicaShape:
    for number, rank in enumerate(ranks):
        if (rank.rank, rank.world_size) != (number, len(ranks)):
            raise FailedPrecondition(
                f"worker {number} of {len(ranks)} says that it is rank {rank.rank} of "
                f"{rank.world_size}: list all ranks, in order"
            )
        if rank.fingerprint != ranks[0].fingerprint:
            raise FailedPrecondition(f"worker {number} serves another model than worker 0")
        if (conflict := _conflict(rank, ranks[0])) is not None:
            raise FailedPrecondition(f"worker {number} {conflict}")
    return ReplicaShape(ranks[0], min(rank.num_blocks for rank in ranks))


def _conflict(rank: worker_pb2.DescribeResponse, first: worker_pb2.DescribeResponse) -> str | None:
    """What is wrong with the KV cache that a rank describes, if anything."""
    if not rank.groups:
        return "describes no group of layers that a KV cache could be for"
    for index, group in enumerate(rank.groups):
        if group.attention_type not in _ATTENTION_TYPES:
            return f"does not say, in words known here, what layers of group {index} attend to"
    sizes = {group.block_size for group in rank.groups}
    if len(sizes) > 1:
        return f"has groups with blocks of {min(sizes)} and of {max(sizes)} tokens: one size serves"
    if (list(rank.groups), rank.drop_last_hit_block) != (
        list(first.groups),
        first.drop_last_hit_block,
    ):
        return "divides its layers into other groups than worker 0"
    return None


def _require_same(before: ReplicaShape, after: ReplicaShape) -> None:
    if after.description.fingerprint != before.description.fingerprint:
        raise FailedPrecondition("the worker came back with another model: restart the scheduler")
    if _conflict(after.description, before.description) is not None:
        raise FailedPrecondition(
            "the worker came back with other groups of layers: restart the scheduler"
        )
    if after.num_blocks < before.num_blocks:
        raise FailedPrecondition(
            f"the worker came back with {after.num_blocks} blocks instead of "
            f"{before.num_blocks}: restart the scheduler"
        )
