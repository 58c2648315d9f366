"""Takes periodic samples of the replicas' statistics, and formats their history as JSON."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.core.fleet.membership import Membership
from services.gateway.core.fleet.replica import Replica
from services.gateway.options.viewer.core.history import (
    BIN_SECONDS,
    History,
    ReplicaStatus,
    median_and_p99,
)

SAMPLE_SECONDS = 2.0
_TIMEOUT_SECONDS = 1.0


@dataclass(eq=False)
class HistoryKeeper:
    """Queries the statistics of each connected scheduler every SAMPLE_SECONDS."""

    history: History
    membership: Membership
    links: SchedulerLinks
    num_queued: Callable[[], int]

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def sample(self) -> None:
        replicas = self.membership.replicas
        statuses = await asyncio.gather(*map(self._status, replicas))
        by_address = {one.address: status for one, status in zip(replicas, statuses, strict=True)}
        self.history.sampled(time.time(), by_address, self.num_queued())

    async def _status(self, replica: Replica) -> ReplicaStatus:
        name = name_of(replica)
        if replica.is_connected:
            try:
                stats = await self.links[replica.address].stats(_TIMEOUT_SECONDS)
                return _status(name, replica, stats)
            except (KeyError, grpc.aio.AioRpcError):
                pass
        return ReplicaStatus(name, replica.is_ready, replica.reason)


def name_of(replica: Replica) -> str:
    """Returns the replica's own name, or its address until the name is known."""
    return (replica.description and replica.description.pool_id) or replica.address


def history_document(history: History, now: float) -> dict[str, Any]:
    """Returns the events, and the statistics of the time bins as parallel lists."""
    bins = history.bins(now)
    return {
        "unix_seconds": now,
        "bin_seconds": BIN_SECONDS,
        "began_unix_seconds": [one.began for one in bins],
        "first_token_seconds": [median_and_p99(one.first_token) for one in bins],
        "per_token_seconds": [median_and_p99(one.per_token) for one in bins],
        "request_seconds": [median_and_p99(one.whole) for one in bins],
        **{name: [getattr(one, name) for one in bins] for name in _NUMBERS},
        "events": [asdict(event) for event in history.events()],
    }


_NUMBERS = (
    *("num_ended", "num_refused", "num_failed", "num_tokens"),
    *("num_running", "num_waiting", "held_share"),
)


def _status(name: str, replica: Replica, stats: scheduler_pb2.GetStatsResponse) -> ReplicaStatus:
    return ReplicaStatus(
        name,
        replica.is_ready,
        replica.reason,
        stats.incarnation,
        is_paused=stats.paused,
        is_drained=stats.drained,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_held_blocks=stats.num_usable_blocks - stats.num_free_blocks,
        num_blocks=stats.num_usable_blocks,
    )
