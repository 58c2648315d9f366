"""Opens the pool and the workers, and opens all of them again after one was lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from stepwell.worker.v1 import worker_pb2

from services.common.errors import FailedPrecondition, InvalidArgument, StepwellError
from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.lease import Taken
from services.common.pool.messages import kv_cache_group_from_proto
from services.common.request.messages import pooler_from_proto
from services.common.request.pooling import Pooler
from services.common.rpc.protocol import OtherProtocol
from services.scheduler.adapters.pool.pool_client import PoolClient
from services.scheduler.adapters.workers.converters import num_stages
from services.scheduler.adapters.workers.worker_client import WorkerGroup
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import PoolLost, WorkersLost

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 0.25
QUIET_SECONDS = 5.0
_MAY_END = (Taken.reason, OtherProtocol.reason)
"""Error reasons of refusals that may be temporary, so that `open` waits: the scheduler that owns
the pool or the worker may exit, or a process with another protocol version may be replaced.
"""


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """The model of a replica, as described by worker 0 (all ranks agree), and its number of KV
    blocks, which is the smallest number that a rank reports.
    """

    description: worker_pb2.DescribeResponse
    num_blocks: int

    @property
    def block_size(self) -> int:
        """Number of tokens in a block, except in KV-cache groups whose states are overwritten."""
        return self.description.groups[0].block_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages into which the model is divided."""
        return num_stages(self.description)

    @property
    def pooler(self) -> Pooler | None:
        """How the model computes a vector from a prompt. None if the model generates tokens."""
        return pooler_from_proto(self.description.pooler)

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether each prompt is computed in one step, without prefix caching."""
        return self.pooler is not None and self.pooler.takes_whole_prompts

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups that share the pool."""
        groups = map(kv_cache_group_from_proto, self.description.groups)
        return tuple(group for group in groups if group is not None)


class ReplicaClient:
    """Opens and watches the pool and the workers over gRPC (implements `PoolAndWorkers`).

    The model and its KV cache must not change while this process runs, because arriving requests
    are checked against them. `open` raises FailedPrecondition if the model or the cache has
    changed, and InvalidArgument if the pool refuses its configuration permanently. `open` raises
    these errors only if they occur twice in a row, so that one wrong message does not end the
    process.
    """

    def __init__(
        self,
        pool: PoolClient,
        workers: WorkerGroup,
        configure: Callable[[ReplicaShape], SchedulerConfig],
    ) -> None:
        """`configure` returns the scheduler's configuration. May raise FailedPrecondition."""
        self._pool = pool
        self._workers = workers
        self._configure = configure
        self._shape: ReplicaShape | None = None
        self._incarnations: list[str] = []
        self._is_opening = False
        self._lost: PoolLost | WorkersLost | None = None
        """A loss during the present attempt to open, which then fails, or before `watch`."""
        self._on_lost: Callable[[PoolLost | WorkersLost], None] | None = None
        pool.on_lost = workers.on_lost = self._note
        self.on_new_workers: Callable[[], None] = lambda: None
        """Called before the first step of new worker processes, after `prepare_workers`."""
        self.prepare_workers: Callable[[], Awaitable[None]] = _nothing
        """Awaited before the first step of new worker processes. May raise StepwellError."""

    async def open(self) -> ReplicaShape:
        """Waits without a time limit until the pool and the workers are reachable, and opens them,
        which empties them. Logs why it waits: at once if the pool or a worker belongs to another
        scheduler or has another protocol version, otherwise after `QUIET_SECONDS`.
        """
        delay, logged, refused = FIRST_RETRY_SECONDS, "", ""
        loop = asyncio.get_running_loop()
        quiet_until = loop.time() + QUIET_SECONDS
        while True:
            self._is_opening, self._lost = True, None
            try:
                return await self._try()
            except StepwellError as error:
                may_end = error.error_reason in _MAY_END
                if isinstance(error, FailedPrecondition | InvalidArgument) and not may_end:
                    if error.message == refused:
                        raise
                    refused = error.message
                    logger.warning(
                        "the kvpool or a worker refused to be opened, trying once more: %s", refused
                    )
                if error.message != logged and (may_end or loop.time() >= quiet_until):
                    logged = error.message
                    logger.info("waiting for the kvpool and the workers: %s", logged)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)
            finally:
                self._is_opening = False

    @property
    def kernels(self) -> str:
        """The names of the kernels that worker 0 uses, as text. Empty before the first opening."""
        return "" if self._shape is None else self._shape.description.kernels

    @property
    def workers_were_ended(self) -> bool:
        return self._workers.were_ended

    def watch(self, on_lost: Callable[[PoolLost | WorkersLost], None]) -> None:
        """Sets a callback for losses of the pool or the workers that occur between calls. It is not
        called for losses while `open` runs. For a loss since then, it is called at once.
        """
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def _note(self, lost: PoolLost | WorkersLost) -> None:
        if self._is_opening or self._on_lost is None:
            self._lost = lost
        else:
            self._on_lost(lost)

    def close(self) -> None:
        self._workers.close()
        self._pool.close()

    async def _try(self) -> ReplicaShape:
        ranks = await self._workers.describe()
        shape = _shape(ranks)
        if self._shape is not None:
            _require_same(self._shape, shape)
            # Blocks of new workers beyond the number at the first opening are not used.
            shape = replace(shape, num_blocks=self._shape.num_blocks)
        config = self._configure(shape)
        seen_generation = max(rank.seen_generation for rank in ranks)
        generation = await self._pool.open(config, seen_generation)
        await self._workers.open(generation)
        incarnations = [rank.incarnation for rank in ranks]
        if incarnations != self._incarnations:
            await self.prepare_workers()
            self._incarnations = incarnations
            self.on_new_workers()
        if self._lost is not None:
            raise self._lost
        self._shape = shape
        logger.info(
            "serving %s: %d blocks of %d tokens, generation %d",
            shape.description.model_name,
            shape.num_blocks,
            shape.block_size,
            generation,
        )
        return shape


async def _nothing() -> None:
    """Workers need no preparation."""


def _shape(ranks: list[worker_pb2.DescribeResponse]) -> ReplicaShape:
    for number, rank in enumerate(ranks):
        if (rank.rank, rank.world_size) != (number, len(ranks)):
            raise FailedPrecondition(
                f"worker {number} of {len(ranks)} is rank {rank.rank} of {rank.world_size}: "
                "--workers must list all ranks, in order"
            )
        if rank.fingerprint != ranks[0].fingerprint:
            raise FailedPrecondition(
                f"worker {number} serves another model than worker 0, or the same model with other "
                "data types or another block size"
            )
        if (conflict := _conflict(rank, ranks[0])) is not None:
            raise FailedPrecondition(f"worker {number} {conflict}")
    return ReplicaShape(ranks[0], min(rank.num_blocks for rank in ranks))


def _conflict(rank: worker_pb2.DescribeResponse, first: worker_pb2.DescribeResponse) -> str | None:
    """What is wrong with a rank's description of its KV cache. None if nothing is wrong."""
    if not rank.groups:
        return "describes no KV-cache group"
    for index, group in enumerate(rank.groups):
        if kv_cache_group_from_proto(group) is None:
            return (
                f"describes KV-cache group {index} with an attention type that this scheduler does "
                "not know"
            )
        if not group.block_size:
            return f"describes KV-cache group {index} with a block size of 0 tokens"
    if rank.groups != first.groups or rank.drop_last_hit_block != first.drop_last_hit_block:
        return "divides its layers into other KV-cache groups than worker 0"
    return None


_NAMES = {
    "fingerprint": "another model",
    "groups": "other groups of layers",
    "drop_last_hit_block": "other groups of layers",
    "pipeline_parallel_size": "another number of pipeline stages",
    "num_tier_blocks": "another kv_offloading_size",
    "max_loras": "another max_loras or max_cpu_loras",
    "max_cpu_loras": "another max_loras or max_cpu_loras",
}
"""Maps fields of a worker's description to clearer names for error messages."""
_MAY_CHANGE = frozenset(
    {
        *("incarnation", "model_name", "num_blocks", "bytes_per_block", "kv_cache_sizing"),
        *("dtype", "kv_cache_dtype", "kernels", "seen_generation"),
    }
)
"""Fields of a worker's description that may change, so that `_require_same` ignores them."""


def _require_same(before: ReplicaShape, after: ReplicaShape) -> None:
    for name in worker_pb2.DescribeResponse.DESCRIPTOR.fields_by_name:
        is_same = getattr(after.description, name) == getattr(before.description, name)
        if name not in _MAY_CHANGE and not is_same:
            what = _NAMES.get(name, f"another {name}")
            raise FailedPrecondition(f"the worker has restarted with {what}: restart the scheduler")
    if after.num_blocks < before.num_blocks:
        raise FailedPrecondition(
            f"the worker has restarted with {after.num_blocks} blocks instead of "
            f"{before.num_blocks}: restart the scheduler"
        )
