"""Queries the replicas' activity while clients request it. All clients get the same samples, so
that the rate of queries to a scheduler does not depend on the number of clients.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace

import grpc
from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.adapters.http.clients.server_routes import stats_document
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.core.fleet.membership import Membership
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.options.viewer.activity.activity_document import (
    Document,
    blocks_document,
    program_document,
    request_document,
    step_documents,
)
from services.gateway.options.viewer.activity.history import name_of

SAMPLE_SECONDS = 0.2
"""Minimum number of seconds between two samples."""
LARGE_POOL_SECONDS = 1.0
"""Minimum number of seconds between two block maps of a pool with more than MAX_CELLS blocks."""
MAX_CELLS = 4096
MAX_STEPS = 256
_TIMEOUT_SECONDS = 1.0


@dataclass(slots=True)
class ReplicaSample:
    """The state of one replica. `stats` is None if the scheduler did not respond."""

    address: str
    name: str = ""
    """The replica's own name, or its address until the name is known."""
    model: str = ""
    is_ready: bool = False
    reason: str = ""
    num_unfinished_here: int = 0
    cached_tokens: int | None = None
    """Number of tokens in the cached blocks of the replica's KV pool, according to the gateway's
    prefix index. If the index does not contain the pool, only free cached blocks are counted.
    """
    directory: str = ""
    """State of this pool in the gateway's prefix index, as a value of DirectoryState. Empty if the
    index does not contain the pool.
    """
    stats: Document | None = None
    requests: list[Document] = field(default_factory=list)
    steps: deque[Document] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    blocks: Document | None = None
    programs: list[tuple[bytes, Document]] = field(default_factory=list)
    """The agent programs that run a tool between two requests, with the digests of their
    tenants.
    """


@dataclass(slots=True)
class _Cursor:
    """The last step that was read from a scheduler process, and the time of its last block map."""

    incarnation: str = ""
    step: int = 0
    done_unix_nanos: int = 0
    blocks_at: float = 0.0


class ActivityFeed:
    """Keeps the newest sample of each replica."""

    def __init__(self, membership: Membership, links: SchedulerLinks, index: PrefixIndex) -> None:
        self._membership = membership
        self._links = links
        self._index = index
        self._samples: dict[str, ReplicaSample] = {}
        self._cursors: dict[str, _Cursor] = {}
        self._lock = asyncio.Lock()
        self._sampled_at = 0.0

    async def samples(self) -> list[ReplicaSample]:
        """Returns samples of all replicas, which are at most SAMPLE_SECONDS old."""
        async with self._lock:
            if time.monotonic() >= self._sampled_at + SAMPLE_SECONDS:
                replicas = self._membership.replicas
                samples = await asyncio.gather(*map(self._sample, replicas))
                self._samples = {sample.address: sample for sample in samples}
                self._cursors = {
                    address: cursor
                    for address, cursor in self._cursors.items()
                    if address in self._samples
                }
                self._sampled_at = time.monotonic()
        return list(self._samples.values())

    async def _sample(self, replica: Replica) -> ReplicaSample:
        before = self._samples.get(replica.address, ReplicaSample(replica.address))
        sample = replace(
            before,
            name=name_of(replica),
            model=replica.description.model_name if replica.description is not None else "",
            is_ready=replica.is_ready,
            reason=replica.reason,
            num_unfinished_here=replica.num_unfinished,
            stats=None,
            requests=[],
            programs=[],
        )
        cursor = self._cursors.setdefault(replica.address, _Cursor())
        try:
            await self._ask(sample, cursor)
        except grpc.aio.AioRpcError as error:
            sample.reason = sample.reason or f"{error.code().name}: {error.details()}"
            sample.blocks = None
        except ValueError as error:
            sample.reason = (
                sample.reason or f"the scheduler's report about its activity is wrong: {error}"
            )
            sample.blocks = None
        self._look_up(replica, sample)
        return sample

    def _look_up(self, replica: Replica, sample: ReplicaSample) -> None:
        served = replica.description
        view = None if served is None else self._index.view(served.cache_node)
        if served is not None and view is not None:
            sample.cached_tokens = view.count * served.block_size
            sample.directory = self._index.node_state(served.cache_node).value
        else:
            sample.cached_tokens, sample.directory = None, ""
            if sample.blocks is not None and served is not None:
                sample.cached_tokens = sample.blocks["num_cached"] * served.block_size

    async def _ask(self, sample: ReplicaSample, cursor: _Cursor) -> None:
        now = time.monotonic()
        is_large = sample.blocks is not None and sample.blocks["blocks_per_cell"] > 1
        wants_blocks = now >= cursor.blocks_at + (LARGE_POOL_SECONDS if is_large else 0)
        request = scheduler_pb2.GetActivityRequest(
            after_step=cursor.step, max_cells=MAX_CELLS if wants_blocks else 0
        )
        answer = await self._links[sample.address].activity(request, _TIMEOUT_SECONDS)
        if answer.stats.incarnation != cursor.incarnation:
            cursor.incarnation, cursor.done_unix_nanos = answer.stats.incarnation, 0
            sample.steps = deque(maxlen=MAX_STEPS)
            if cursor.step:  # A new scheduler process counts its steps from 0 again.
                cursor.step = 0
                await self._ask(sample, cursor)
                return
        if wants_blocks:
            cursor.blocks_at = now
            found = answer.HasField("blocks")
            sample.blocks = blocks_document(answer.blocks) if found else None
        if answer.steps:
            sample.steps.extend(step_documents(answer.steps, cursor.done_unix_nanos))
            cursor.step = answer.steps[-1].step
            cursor.done_unix_nanos = answer.steps[-1].done_unix_nanos
        unix_nanos = time.time_ns()
        sample.stats = stats_document(answer.stats)
        sample.programs = [(one.tenant, program_document(one)) for one in answer.programs]
        sample.requests = [request_document(one, unix_nanos) for one in answer.requests]
