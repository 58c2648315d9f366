"""Checks the results of pool transactions against the operations, before results are used."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import le
from types import NoneType

from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool import operations as ops
from services.common.pool.block_hash import HASH_BYTES
from services.common.pool.ids import RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.adapters.workers.answer_check import WrongAnswer

_RESULTS: dict[type[ops.Operation], type[ops.OperationResult]] = {
    ops.Grow: ops.GrowResult,
    ops.Lookup: ops.LookupResult,
    ops.Admit: ops.AdmitResult,
    ops.ResetPrefixCache: ops.ResetPrefixCacheResult,
}


def requests_of(operations: Iterable[ops.Operation]) -> list[RequestKey]:
    """The requests for which the operations allocate, publish (cache) or look up blocks."""
    found: list[RequestKey] = []
    for operation in operations:
        match operation:
            case ops.Grow() | ops.Lookup() | ops.Commit():
                found += operation.requests
            case ops.Admit():
                found += [admission.request for admission in operation.admissions]
    return found


@dataclass(frozen=True, slots=True)
class _HitChange:
    """An admission that the pool refused because its prefix hit differs from the planned hit."""

    planned: ops.Admission
    num_hit_tokens: int
    shared_prefix_boundary: int


class OutcomeCheck:
    """Checks the results of transactions, from one opening of the pool to the next."""

    def __init__(self, num_blocks: int, groups: Sequence[KVCacheGroup]) -> None:
        self._last_block = num_blocks - 1
        self._groups = groups
        self._only_full = all(one.attention_type is AttentionType.FULL for one in groups)
        self._has_states = any(one.attention_type is AttentionType.STATE_SPACE for one in groups)
        self._change: _HitChange | None = None
        """The changed prefix hit of the last Admit operation. None after a Lookup operation."""

    def check(
        self,
        operations: Sequence[ops.Operation],
        outcome: ops.Outcome,
        events: Iterable[kvpool_pb2.Event] = (),
    ) -> None:
        """Raises WrongAnswer if the outcome or the events contradict the operations."""
        most, stop = self._last_block, outcome.stop
        if outcome.num_free_blocks > most:
            raise WrongAnswer(
                f"num_free_blocks: is {outcome.num_free_blocks}, but the kvpool has only {most}"
            )
        count = len(operations) if stop is None else stop.operation_index + 1
        if not len(outcome.results) == count <= len(operations):
            raise WrongAnswer(
                f"results: has {len(outcome.results)} results for {len(operations)} operations"
            )
        for index, result in enumerate(outcome.results):
            operation = operations[index]
            if type(result) is not _RESULTS.get(type(operation), NoneType):
                raise WrongAnswer(
                    f"results[{index}]: is not the result of the operation "
                    f"{type(operation).__name__}"
                )
            if result is not None:
                is_last = stop is not None and index == stop.operation_index
                self._check_result(operation, result, stop if is_last else None)
        if stop is not None and isinstance(operations[stop.operation_index], ops.Lookup):
            raise WrongAnswer("stop: a Lookup cannot be stopped, because it allocates no blocks")
        if outcome.block_ids_to_zero or outcome.copies:
            self._check_states(outcome)
        for event in events:
            self._check_event(event)
        if outcome.num_retained_blocks > outcome.num_free_blocks:
            raise WrongAnswer(
                f"num_retained_blocks: is {outcome.num_retained_blocks}, above num_free_blocks"
            )
        for one in outcome.contexts:
            if not one.num_own_blocks <= one.num_blocks <= most:
                raise WrongAnswer(
                    f"contexts: num_own_blocks is {one.num_own_blocks}, but num_blocks is "
                    f"{one.num_blocks}, of {most} in the kvpool"
                )

    def _check_result(
        self, operation: ops.Operation, result: ops.OperationResult, stop: ops.Stop | None
    ) -> None:
        match operation, result:
            case ops.Grow(), ops.GrowResult():
                count = len(operation.requests)
                if stop is not None:
                    count = _stopped(stop, count, ops.StopReason.NO_BLOCKS)
                self._check_blocks(result.groups, count)
                if self._only_full:
                    _require_distinct(block for one in result.groups for block in one.block_ids)
            case ops.Lookup(), ops.LookupResult():
                _check_hits(operation, result)
                self._change = None
            case ops.Admit(), ops.AdmitResult():
                count = len(operation.admissions)
                if stop is not None:
                    count = _stopped(stop, count, *ops.StopReason)
                    _check_change(stop, operation.admissions[count])
                self._check_progress(operation.admissions, stop)
                self._check_blocks(result.groups, count)
                self._check_tables(operation.admissions[:count], result.groups)

    def _check_progress(self, admissions: Sequence[ops.Admission], stop: ops.Stop | None) -> None:
        """Raises WrongAnswer if the pool refuses an admission twice for one changed prefix hit,
        because the scheduler would repeat the admission forever. The pool then lacks blocks that
        the scheduler expects, for example because it received other hashes.
        """
        before, self._change = self._change, None
        if stop is not None and stop.reason is ops.StopReason.HIT_CHANGED:
            self._change = _HitChange(
                admissions[stop.item_index], stop.num_hit_tokens, stop.shared_prefix_boundary
            )
            if self._change == before:
                raise WrongAnswer(
                    "stop: the kvpool reports twice that the prefix hit has changed to "
                    f"{stop.num_hit_tokens} tokens"
                )

    def _check_blocks(self, groups: Sequence[ops.GroupBlocks], count: int) -> None:
        if len(groups) != len(self._groups):
            raise WrongAnswer(f"groups: has {len(groups)} KV-cache groups, not {len(self._groups)}")
        for granted, group in zip(groups, self._groups, strict=True):
            if len(granted.num_blocks) != count:
                raise WrongAnswer(
                    f"num_blocks: has {len(granted.num_blocks)} values for {count} requests"
                )
            if sum(granted.num_blocks) != len(granted.block_ids):
                raise WrongAnswer(
                    f"block_ids: has {len(granted.block_ids)} blocks, but the sum of num_blocks "
                    "differs"
                )
            least = 1 if group.attention_type is AttentionType.FULL else 0
            self._require_blocks(granted.block_ids, least)

    def _check_tables(
        self, admissions: Sequence[ops.Admission], groups: Sequence[ops.GroupBlocks]
    ) -> None:
        """Raises WrongAnswer if a full-attention table has a wrong length or a repeated block."""
        for granted, group in zip(groups, self._groups, strict=True):
            if group.attention_type is not AttentionType.FULL:
                continue
            end = 0
            for admission, count in zip(admissions, granted.num_blocks, strict=True):
                asked = -(-admission.num_slots // group.block_size)
                if count < asked or (count > asked and not admission.holds_blocks):
                    raise WrongAnswer(f"num_blocks: is {count} for a request that needs {asked}")
                begin, end = end, end + count
                _require_distinct(granted.block_ids[begin:end])

    def _check_states(self, outcome: ops.Outcome) -> None:
        if not self._has_states:
            raise WrongAnswer(
                "block_ids_to_zero, copies: must be empty, because no layer is recurrent"
            )
        self._require_blocks(outcome.block_ids_to_zero, 1)
        for copy in outcome.copies:
            if copy.group >= len(self._groups):
                raise WrongAnswer(
                    f"copies.group: {copy.group} is not the number of a KV-cache group"
                )
            self._require_blocks((copy.source, copy.target), 1)

    def _check_event(self, event: kvpool_pb2.Event) -> None:
        match event.WhichOneof("event"):
            case None:
                raise WrongAnswer("events: an event is empty")
            case "cleared":
                return
            case kind:
                change: kvpool_pb2.BlocksStored | kvpool_pb2.BlocksRemoved = getattr(event, kind)
        if change.group >= len(self._groups) or len(change.hashes) % HASH_BYTES:
            raise WrongAnswer(
                f"events: {len(change.hashes)} bytes of hashes in group {change.group}, which are "
                "not whole hashes of a known group"
            )

    def _require_blocks(self, block_ids: Sequence[int], least: int) -> None:
        if block_ids and not least <= min(block_ids) <= max(block_ids) <= self._last_block:
            raise WrongAnswer(f"block_ids: a block is not from {least} to {self._last_block}")


def _stopped(stop: ops.Stop, count: int, *reasons: ops.StopReason) -> int:
    """The number of items of an operation that were completed before it stopped. Raises WrongAnswer
    if the stop is impossible.
    """
    if stop.item_index >= count or stop.reason not in reasons:
        raise WrongAnswer(f"stop: {stop.reason.value} at item {stop.item_index} of {count}")
    return stop.item_index


def _check_change(stop: ops.Stop, admission: ops.Admission) -> None:
    """Raises WrongAnswer if a stop reports a changed hit that equals the planned hit, or a limit
    that the admission does not have. The scheduler would otherwise repeat the admission forever.
    """
    if stop.reason is ops.StopReason.RETAINED and admission.num_retained_blocks is None:
        raise WrongAnswer(
            "stop: its reason is RETAINED, but the admission has no limit on blocks of contexts"
        )
    if stop.reason is ops.StopReason.KEPT_FREE and not admission.num_blocks_kept_free:
        raise WrongAnswer("stop: its reason is KEPT_FREE, but the admission leaves no blocks free")
    if stop.reason is not ops.StopReason.HIT_CHANGED:
        return
    hit, boundary = stop.num_hit_tokens, stop.shared_prefix_boundary
    is_same = hit == admission.num_hit_tokens and boundary == admission.shared_prefix_boundary
    if is_same or hit > admission.max_hit_tokens or admission.holds_blocks:
        raise WrongAnswer(
            f"stop: its reason is HIT_CHANGED, but the reported prefix hit of {hit} tokens is "
            "impossible or not new"
        )


def _check_hits(lookup: ops.Lookup, result: ops.LookupResult) -> None:
    count = len(lookup.requests)
    divergent = count if lookup.with_divergent_hits else 0
    found = tuple(
        map(
            len,
            (
                result.num_hit_tokens,
                result.shared_prefix_boundaries,
                result.num_divergent_hit_tokens,
            ),
        )
    )
    if found != (count, count, divergent):
        raise WrongAnswer(f"num_hit_tokens: {found} values for {count} requests")
    for hits in (result.num_hit_tokens, result.num_divergent_hit_tokens):
        if not all(map(le, hits, lookup.max_hit_tokens)):
            raise WrongAnswer(
                "num_hit_tokens: a prefix hit is longer than the max_hit_tokens of the Lookup"
            )


def _require_distinct(block_ids: Iterable[int]) -> None:
    blocks = list(block_ids)
    if len(set(blocks)) != len(blocks):
        raise WrongAnswer("block_ids: a block is allocated twice")
