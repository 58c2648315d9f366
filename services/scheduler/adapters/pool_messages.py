"""Between the scheduler's words for the pool and the messages of stepwell.kvpool.v1."""

from collections.abc import Iterable, Sequence

from stepwell.kvpool.v1 import kvpool_pb2

from services.common.block_hash import BlockHash
from services.scheduler.core import ports

_STOP_REASONS = {
    kvpool_pb2.STOP_REASON_NO_BLOCKS: ports.StopReason.NO_BLOCKS,
    kvpool_pb2.STOP_REASON_HIT_CHANGED: ports.StopReason.HIT_CHANGED,
}


def to_message(operation: ports.Operation) -> kvpool_pb2.Operation:
    """One operation on the wire."""
    match operation:
        case ports.Release(keys):
            return kvpool_pb2.Operation(release=kvpool_pb2.Release(requests=keys))
        case ports.Grow(keys, computed, slots):
            return kvpool_pb2.Operation(
                grow=kvpool_pb2.Grow(requests=keys, num_computed_tokens=computed, num_slots=slots)
            )
        case ports.Commit(keys, num_tokens, new_hashes):
            return kvpool_pb2.Operation(
                commit=kvpool_pb2.Commit(
                    requests=keys,
                    num_tokens=num_tokens,
                    num_new_hashes=[len(hashes) for hashes in new_hashes],
                    new_hashes=_concatenate(new_hashes),
                )
            )
        case ports.Lookup(keys, max_hit_tokens, new_hashes):
            return kvpool_pb2.Operation(
                lookup=kvpool_pb2.Lookup(
                    requests=keys,
                    max_hit_tokens=max_hit_tokens,
                    num_new_hashes=[len(hashes) for hashes in new_hashes],
                    new_hashes=_concatenate(new_hashes),
                )
            )
        case ports.Admit(admissions):
            return kvpool_pb2.Operation(
                admit=kvpool_pb2.Admit(admissions=[_admission(item) for item in admissions])
            )
        case ports.ResetPrefixCache():
            return kvpool_pb2.Operation(reset_prefix_cache=kvpool_pb2.ResetPrefixCache())


def to_outcome(response: kvpool_pb2.TransactResponse) -> ports.Outcome:
    """What came of a transaction, from the wire."""
    grown: list[ports.BlockTables] = []
    admitted: list[ports.BlockTables] = []
    hits: list[int] = []
    reset_done = False
    for result in response.results:
        kind = result.WhichOneof("result")
        if kind == "grow":
            grown += _tables(result.grow.groups)
        elif kind == "admit":
            admitted += _tables(result.admit.groups)
        elif kind == "lookup":
            hits += result.lookup.num_hit_tokens
        elif kind == "reset_prefix_cache":
            reset_done = result.reset_prefix_cache.done
    return ports.Outcome(
        response.num_free_blocks,
        _stop(response),
        grown,
        hits,
        admitted,
        reset_done,
        tuple(response.block_ids_to_zero),
    )


def _stop(response: kvpool_pb2.TransactResponse) -> ports.Stop | None:
    if not response.HasField("stop"):
        return None
    stop = response.stop
    return ports.Stop(
        stop.operation_index, stop.item_index, _STOP_REASONS[stop.reason], stop.num_hit_tokens
    )


def _admission(item: ports.Admission) -> kvpool_pb2.Admission:
    return kvpool_pb2.Admission(
        request=item.key,
        max_hit_tokens=item.max_hit_tokens,
        num_hit_tokens=item.num_hit_tokens,
        num_slots=item.num_slots,
        num_commit_tokens=item.num_commit_tokens,
        num_reserve_slots=item.num_reserve_slots,
        num_watermark_blocks=item.num_watermark_blocks,
        traceparent=item.traceparent,
        resumed=item.resumed,
    )


def _concatenate(new_hashes: Sequence[Sequence[BlockHash]]) -> bytes:
    return b"".join(block_hash for hashes in new_hashes for block_hash in hashes)


def _tables(groups: Iterable[kvpool_pb2.GroupBlocks]) -> list[ports.BlockTables]:
    """Blocks packed per group, as one tuple of lists per request."""
    per_group: list[list[list[int]]] = []
    for group in groups:
        start, ids = 0, list(group.block_ids)
        tables: list[list[int]] = []
        for count in group.num_blocks:
            tables.append(ids[start : start + count])
            start += count
        per_group.append(tables)
    return list(zip(*per_group, strict=True))
