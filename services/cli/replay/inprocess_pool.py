"""The scheduler's pool port over the real pool core in the same process: no wire, no waiting."""

from collections.abc import Sequence
from typing import cast

from services.common.kv_cache_groups import AttentionType, GroupSpec
from services.kvpool.core import operations as pool_ops
from services.kvpool.core.ids import RequestNumber
from services.kvpool.core.kv_pool import KVPool, PoolConfig
from services.scheduler.core import ports


class InProcessPool:
    """A `ports.KVPool` that calls the pool directly; `core` is open to look at.

    Without `groups` it has one, of full attention.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        groups: Sequence[GroupSpec] = (),
        drop_last_hit_block: bool = False,
    ) -> None:
        groups = groups or [GroupSpec(AttentionType.FULL, block_size)]
        self.core = KVPool(
            PoolConfig(
                num_blocks=num_blocks,
                groups=tuple(groups),
                enable_prefix_caching=enable_prefix_caching,
                fingerprint=b"",
                drop_last_hit_block=drop_last_hit_block,
            )
        )
        self.num_transactions = 0

    async def transact(
        self,
        operations: Sequence[ports.Operation],
        traceparent: str = "",  # noqa: ARG002 - traces end at the wire
    ) -> ports.Outcome:
        self.num_transactions += 1
        outcome = self.core.transact([_translate(operation) for operation in operations])
        grown: list[ports.BlockTables] = []
        admitted: list[ports.BlockTables] = []
        hits: list[int] = []
        reset_done = False
        for result in outcome.results:
            match result:
                case pool_ops.GrowResult(groups):
                    grown += _tables(groups)
                case pool_ops.AdmitResult(groups):
                    admitted += _tables(groups)
                case pool_ops.LookupResult(num_hit_tokens):
                    hits += num_hit_tokens
                case pool_ops.ResetPrefixCacheResult(done):
                    reset_done = done
        return ports.Outcome(
            outcome.num_free_blocks,
            _stop(outcome.stop),
            grown,
            hits,
            admitted,
            reset_done,
            outcome.block_ids_to_zero,
        )


def _stop(stop: pool_ops.Stop | None) -> ports.Stop | None:
    if stop is None:
        return None
    return ports.Stop(
        stop.operation_index,
        stop.item_index,
        ports.StopReason(stop.reason.value),
        stop.num_hit_tokens or 0,
    )


def _numbers(keys: Sequence[int]) -> Sequence[RequestNumber]:
    return cast("Sequence[RequestNumber]", keys)


def _translate(operation: ports.Operation) -> pool_ops.Operation:
    match operation:
        case ports.Release(keys):
            return pool_ops.Release(_numbers(keys))
        case ports.Grow(keys, computed, slots):
            return pool_ops.Grow(_numbers(keys), computed, slots)
        case ports.Commit(keys, num_tokens, new_hashes):
            return pool_ops.Commit(_numbers(keys), num_tokens, new_hashes)
        case ports.Lookup(keys, max_hit_tokens, new_hashes):
            return pool_ops.Lookup(_numbers(keys), max_hit_tokens, new_hashes)
        case ports.Admit(admissions):
            return pool_ops.Admit([_admission(admission) for admission in admissions])
        case ports.ResetPrefixCache():
            return pool_ops.ResetPrefixCache()


def _admission(admission: ports.Admission) -> pool_ops.Admission:
    return pool_ops.Admission(
        request=RequestNumber(admission.key),
        max_hit_tokens=admission.max_hit_tokens,
        num_hit_tokens=admission.num_hit_tokens,
        num_slots=admission.num_slots,
        num_commit_tokens=admission.num_commit_tokens,
        num_reserve_slots=admission.num_reserve_slots,
        num_watermark_blocks=admission.num_watermark_blocks,
        resumed=admission.resumed,
    )


def _tables(groups: tuple[pool_ops.GroupBlocks, ...]) -> list[ports.BlockTables]:
    """Packed blocks of each group as one tuple of lists per request."""
    per_group: list[list[list[int]]] = []
    for group in groups:
        block_ids = cast("list[int]", group.block_ids)
        start, tables = 0, []
        for count in group.num_blocks:
            tables.append(block_ids[start : start + count])
            start += count
        per_group.append(tables)
    return list(zip(*per_group, strict=True))
