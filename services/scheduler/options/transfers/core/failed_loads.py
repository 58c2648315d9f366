"""Undoes failed loads: resets requests to the position before their first invalid block."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from services.common.pool.ids import BlockId
from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request


def scheduled_tokens(plans: Iterable[SchedulerOutput]) -> Mapping[Request, int]:
    """The number of tokens of each request that these steps computed or compute."""
    scheduled: Counter[Request] = Counter()
    for plan in plans:
        scheduled.update(dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True)))
    return scheduled


def set_back(
    requests: Iterable[Request],
    block_tables: Mapping[Request, BlockTables],
    group: KVCacheGroup,
    invalid: Collection[BlockId],
    scheduled: Mapping[Request, int],
) -> tuple[set[Request], list[BlockId]]:
    """Resets the computed tokens of requests to the start of their first invalid block. Only for
    models with one KV-cache group.

    As in vLLM, if several requests share an invalid block, only the first request computes the
    block again, and the block counts as computed for the others. `scheduled` maps a request to its
    number of tokens in flight, which count as computed but are not. Blocks outside the sliding
    window are skipped, because another request may own them now.

    Returns the requests that have an invalid block, and a list of all their blocks from the first
    invalid one on.
    """
    affected: set[Request] = set()
    recomputed: set[BlockId] = set()
    stale: list[BlockId] = []
    for request in requests:
        (blocks,) = block_tables[request]
        num_computed = request.num_computed_tokens - scheduled.get(request, 0)
        own = blocks[: -(-num_computed // group.block_size)]
        seen = range(group.first_seen_block(num_computed), len(own))
        bad = [index for index in seen if own[index] in invalid]
        if not bad:
            continue
        affected.add(request)
        request.draft_token_ids = []
        first = next((index for index in bad if own[index] not in recomputed), None)
        recomputed.update(own[index] for index in bad)
        if first is None:
            request.num_computed_tokens = num_computed
        else:
            request.num_computed_tokens = first * group.block_size
        stale += blocks[bad[0] :]
    return affected, stale
