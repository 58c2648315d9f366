"""Finds requests, blocks and other objects that the services have not released after a run."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from services.common.pool.ids import ContextId
from services.common.redis.directory_layout import DirectoryKeys
from services.gateway.__main__ import Gateway
from services.kvpool.__main__ import PoolService
from services.kvpool.core.pool_host import HostedPool
from services.scheduler.__main__ import SchedulerService
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.simulation.explore.contents import wrong_contents
from services.simulation.explore.fleet import Fleet
from services.simulation.explore.members import REDIS
from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.memory_redis import MemoryRedis
from services.simulation.runtime.process import PROCESS, State
from services.worker.core.model_runner import ModelRunner

_LATE_SECONDS = 10.0
_MAY_BE_LEFT = {"KeyedRequests._expire", "Fleet._update"}
"""Timers that may remain: for answers with an idempotency key, and for missing models."""


def what_is_left(fleet: Fleet, num_gateways: int) -> list[str]:
    """Returns sentences about requests, sessions, blocks and rows (requests' indices in a worker's
    batch) that were not released, and about blocks with wrong contents.
    """
    found = []
    insides = [service.process.inside for service in fleet.services.values()]
    hosted = [
        one for inside in insides if isinstance(inside, PoolService) for one in inside.host.pools()
    ]
    num_cached = sum(one.pool.num_cached_hashes for one in hosted)
    for name, service in fleet.services.items():
        match service.process.inside:
            case Gateway() as gateway:
                left = _in_gateway(gateway, num_cached)
            case SchedulerService() as scheduler:
                left = _in_scheduler(scheduler, num_gateways, _contexts_in(pools_of(fleet, name)))
            case PoolService() as pool:
                left = _in_pool(pool)
            case ModelRunner() as runner:
                left = wrong_contents(runner, pools_of(fleet, name))
            case _:
                continue
        found += [f"{name} has {number} {what}" for what, number in left if number]
    return found


def pools_of(fleet: Fleet, service: str) -> list[HostedPool[Any]]:
    """The pools of the replica to which a scheduler or worker belongs."""
    pool = fleet.services[f"pool-{service.split('-')[1]}"].process.inside
    return list(pool.host.pools()) if isinstance(pool, PoolService) else []


def _contexts_in(pools: Iterable[HostedPool[Any]]) -> dict[ContextId, int]:
    """Maps the contexts in pools to their numbers of blocks."""
    queues = [hosted.pool._blocks.contexts for hosted in pools]
    return {
        context: len(blocks)
        for queue in queues
        if queue is not None
        for context, blocks in queue._contexts.items()
    }


Left = Iterator[tuple[str, int]]
"""Yields pairs of a kind of objects that were not released, and their number."""


def _in_gateway(gateway: Gateway, num_cached: int) -> Left:
    yield "requests", gateway.gate.inside
    yield "arriving requests", gateway.fleet.arrivals._counts.total()
    yield "sequences without a replica", gateway.fleet.num_waiting
    if views := gateway.parts.prefix_index.views:
        num_known = sum(view.count for view in views)
        yield f"cached prefixes more than the {num_cached} of the pools", num_known - num_cached
    for replica in gateway.membership.replicas:
        yield f"sequences at {replica.address}", replica.num_unfinished
        yield f"kept sequences at {replica.address}", len(replica._held)
    for option in gateway.parts.options:
        sessions = getattr(option, "sessions", ())
        yield "sessions", sum(one.is_in_turn or one.num_turns > 0 for one in sessions)


def _in_scheduler(
    service: SchedulerService, num_gateways: int, in_pool: dict[ContextId, int]
) -> Left:
    parts = service.parts
    scheduler = parts.engine.scheduler
    yield "requests", len(parts.engine.unfinished)
    yield "requests between turns", len(scheduler.queues.between_turns)
    yield "rows in use", scheduler.config.max_num_seqs - len(scheduler.rows._free)
    yield "steps in flight", len(scheduler.steps.in_flight)
    yield "pending operations", bool(scheduler.kv_cache_manager.pending)
    yield "claims on adapters", parts.adapters._claims.total()
    yield "gateways too many", len(parts.sessions) - num_gateways

    retention = scheduler.retention
    if isinstance(retention, ProgramRetention):
        contexts, programs = retention._contexts.keys(), retention._known
        paused = {*programs._paused, *programs._kept}
        yield "programs in a turn", retention.num_in_turn
        yield "contexts that are not paused", len(contexts ^ paused)
        known = {*contexts, *retention._dropped}
        yield "contexts that it does not know in its pool", len(in_pool.keys() - known)
        counted = {one.id: one.num_blocks for one in retention._contexts.values()}
        wrong = [one for one, number in counted.items() if number != in_pool.get(one, 0)]
        yield "contexts with another number of blocks in its pool", len(wrong)

    transfers: Any = scheduler.transfers
    if transfers is not None:
        transfers.connector.index.check()
        yield "requests with transfers", len(transfers._block_tables)
        yield "loads", len(transfers._loading)
        yield "blocks in transfer", len(transfers._leaving)
        yield "pinned blocks of the tier", len(transfers.connector.index._pins)


def _in_pool(service: PoolService) -> Left:
    for hosted in service.host.pools():
        hosted.pool.check()
        config = hosted.pool.config
        yield "blocks in use", config.num_blocks - 1 - hosted.pool.num_free_blocks
        requests = hosted.pool._requests
        yield "requests with hashes", len(requests.chains)
        yield "requests with blocks or a hit", len(requests.tables) + len(requests._hits)


def left_on_disks(fleet: Fleet) -> list[str]:
    """Returns sentences about defects on disks after all services have stopped: keys in Redis that
    never expire, and step logs that are incomplete although the disk was never full.
    """
    redis = fleet.services.get(REDIS)
    found = [] if redis is None else list(_left_in_redis(redis.process.inside))
    for name, service in fleet.services.items():
        for file in service.process.files:
            entries = [json.loads(line) for line in file.content.splitlines()]
            if entries[-1:] != [{"call": "end"}] and not file.has_failed:
                found.append(f"the step log of {name} ends with {entries[-1:]}")
    return found


def _left_in_redis(redis: MemoryRedis) -> Iterator[str]:
    """Returns sentences about keys that never expire. The record of a killed pool may remain as
    long as its lease. That can take minutes if Redis's clock was put back.
    """
    for key in redis.lasting_keys:
        if key.endswith(":nodes"):
            leases = DirectoryKeys(key.removesuffix(":nodes")).lease
            if not {leases(node) for node in redis.names_in(key)} <= {*redis.keys}:
                yield f"the key {key} is left"
        elif not key.endswith((":log", ":epoch")):
            yield f"the key {key} is left"


def late_timers(loop: VirtualLoop) -> Counter[str]:
    """Counts the timers of living services that are due in ten seconds or later, by service and
    function.
    """
    found: Counter[str] = Counter()
    timers: list[tuple[float, int, Any]] = loop._timers
    for due, _, handle in timers:
        process = handle._context.get(PROCESS)
        is_late = due > loop.time() + _LATE_SECONDS and not handle._cancelled
        if not is_late or process is None or process.state is State.DEAD:
            continue
        callback = getattr(handle._callback, "func", handle._callback)
        is_own = callback.__module__.startswith("services.simulation")
        if not is_own and callback.__qualname__ not in _MAY_BE_LEFT:
            found[f"{process.name} {callback.__qualname__}"] += 1
    return found
