"""Converts pool transactions from and to the messages of stepwell.kvpool.v1."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain
from typing import cast

from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool import operations as ops
from services.common.pool.block_hash import HASH_BYTES, BlockHash
from services.common.pool.ids import BlockId, RequestKey
from services.common.rpc.proto_enum import ProtoEnum

_STOP_REASONS = ProtoEnum(ops.StopReason, kvpool_pb2.StopReason, "STOP_REASON_")


def operation_to_proto(  # noqa: PLR0911 - one for each kind
    operation: ops.Operation,
) -> kvpool_pb2.Operation:
    match operation:
        case ops.Release(requests, as_one_list):
            return kvpool_pb2.Operation(
                release=kvpool_pb2.Release(requests=requests, as_one_list=as_one_list)
            )
        case ops.RemoveSkippedBlocks(requests, num_computed_tokens):
            return kvpool_pb2.Operation(
                remove_skipped_blocks=kvpool_pb2.RemoveSkippedBlocks(
                    requests=requests, num_computed_tokens=num_computed_tokens
                )
            )
        case ops.Grow(requests, num_computed_tokens, num_slots, num_tokens):
            return kvpool_pb2.Operation(
                grow=kvpool_pb2.Grow(
                    requests=requests,
                    num_computed_tokens=num_computed_tokens,
                    num_slots=num_slots,
                    num_tokens=num_tokens,
                )
            )
        case ops.Commit(requests, num_tokens, new_hashes):
            return kvpool_pb2.Operation(
                commit=kvpool_pb2.Commit(
                    requests=requests,
                    num_tokens=num_tokens,
                    num_new_hashes=[len(hashes) for hashes in new_hashes],
                    new_hashes=_concatenate(new_hashes),
                )
            )
        case ops.Lookup(requests, max_hit_tokens, new_hashes, with_divergent_hits):
            return kvpool_pb2.Operation(
                lookup=kvpool_pb2.Lookup(
                    requests=requests,
                    max_hit_tokens=max_hit_tokens,
                    num_new_hashes=[len(hashes) for hashes in new_hashes],
                    new_hashes=_concatenate(new_hashes),
                    with_divergent_hits=with_divergent_hits,
                )
            )
        case ops.Admit(admissions):
            return kvpool_pb2.Operation(
                admit=kvpool_pb2.Admit(admissions=map(_admission_to_proto, admissions))
            )
        case ops.ResetPrefixCache():
            return kvpool_pb2.Operation(reset_prefix_cache=kvpool_pb2.ResetPrefixCache())
        case ops.EvictBlocks(block_ids):
            return kvpool_pb2.Operation(evict_blocks=kvpool_pb2.EvictBlocks(block_ids=block_ids))
        case ops.BeginStep():
            return kvpool_pb2.Operation(begin_step=kvpool_pb2.BeginStep())
        case ops.ReleaseCopies(num_copies):
            message = kvpool_pb2.ReleaseCopies(num_copies=num_copies)
            return kvpool_pb2.Operation(release_copies=message)


def operations_from_proto(messages: Iterable[kvpool_pb2.Operation]) -> list[ops.Operation]:
    """Converts a transaction's operations. Raises MalformedTransaction, which names the field."""
    return [
        _operation_from_proto(message, f"operations[{index}]")
        for index, message in enumerate(messages)
    ]


def outcome_to_proto(
    outcome: ops.Outcome, generation: int, sequence: int
) -> kvpool_pb2.TransactResponse:
    """Converts the answer to a transaction of this generation and sequence number."""
    message = kvpool_pb2.TransactResponse(
        generation=generation,
        sequence=sequence,
        results=map(_result_to_proto, outcome.results),
        stop=None if outcome.stop is None else _stop_to_proto(outcome.stop),
        num_free_blocks=outcome.num_free_blocks,
    )
    if outcome.block_ids_to_zero or outcome.copies:  # as in models with states
        message.block_ids_to_zero.extend(outcome.block_ids_to_zero)
        message.copies.extend(
            kvpool_pb2.BlockCopy(group=copy.group, source=copy.source, target=copy.target)
            for copy in outcome.copies
        )
    return message


def outcome_from_proto(message: kvpool_pb2.TransactResponse) -> ops.Outcome:
    """Converts the outcome in an answer. Raises ValueError for an unknown stop reason."""
    stop = _stop_from_proto(message.stop) if message.HasField("stop") else None
    results = tuple(map(_result_from_proto, message.results))
    if not (message.block_ids_to_zero or message.copies):  # as in models without states
        return ops.Outcome(message.num_free_blocks, results, stop)
    copies = (
        ops.BlockCopy(copy.group, BlockId(copy.source), BlockId(copy.target))
        for copy in message.copies
    )
    to_zero = cast("tuple[BlockId, ...]", tuple(message.block_ids_to_zero))
    return ops.Outcome(message.num_free_blocks, results, stop, to_zero, tuple(copies))


def block_hashes_from_proto(packed: bytes, field: str) -> list[BlockHash]:
    """Splits concatenated hashes. Raises MalformedTransaction if the last one is incomplete."""
    if len(packed) % HASH_BYTES:
        raise ops.MalformedTransaction(
            f"{len(packed)} bytes are no whole number of hashes of {HASH_BYTES} bytes", field=field
        )
    return [
        BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)
    ]


def _operation_from_proto(  # noqa: PLR0911 - one for each kind
    message: kvpool_pb2.Operation, where: str
) -> ops.Operation:
    match message.WhichOneof("operation"):
        case "release":
            return ops.Release(_requests(message.release.requests), message.release.as_one_list)
        case "remove_skipped_blocks":
            removal = message.remove_skipped_blocks
            return ops.RemoveSkippedBlocks(
                _requests(removal.requests), list(removal.num_computed_tokens)
            )
        case "grow":
            grow = message.grow
            return ops.Grow(
                _requests(grow.requests),
                list(grow.num_computed_tokens),
                list(grow.num_slots),
                list(grow.num_tokens),
            )
        case "commit":
            commit = message.commit
            hashes = _hashes_by_request(commit, f"{where}.commit")
            return ops.Commit(_requests(commit.requests), list(commit.num_tokens), hashes)
        case "lookup":
            lookup = message.lookup
            hashes = _hashes_by_request(lookup, f"{where}.lookup")
            return ops.Lookup(
                _requests(lookup.requests),
                list(lookup.max_hit_tokens),
                hashes,
                lookup.with_divergent_hits,
            )
        case "admit":
            return ops.Admit(
                [
                    _admission_from_proto(admission, f"{where}.admit.admissions[{index}]")
                    for index, admission in enumerate(message.admit.admissions)
                ]
            )
        case "reset_prefix_cache":
            return ops.ResetPrefixCache()
        case "evict_blocks":
            return ops.EvictBlocks(cast("list[BlockId]", list(message.evict_blocks.block_ids)))
        case "begin_step":
            return ops.BeginStep()
        case "release_copies":
            return ops.ReleaseCopies(message.release_copies.num_copies)
        case _:
            raise ops.MalformedTransaction(
                "the operation is not set, or not known here", field=where
            )


_CONVERTED = {"new_hashes", "num_tokens", "num_stored_tokens"}
_EQUAL = [one.name for one in fields(ops.Admission) if one.name not in _CONVERTED]
"""The fields of an admission that its message has with the same name, type and default."""


def _admission_to_proto(admission: ops.Admission) -> kvpool_pb2.Admission:
    return kvpool_pb2.Admission(
        new_hashes=b"".join(admission.new_hashes),
        num_tokens=admission.num_tokens,
        num_stored_tokens=admission.num_stored_tokens,
        **{name: getattr(admission, name) for name in _EQUAL},
    )


def _admission_from_proto(message: kvpool_pb2.Admission, where: str) -> ops.Admission:
    has_stored = message.HasField("num_stored_tokens")
    return ops.Admission(
        new_hashes=block_hashes_from_proto(message.new_hashes, f"{where}.new_hashes"),
        num_tokens=message.num_tokens if message.HasField("num_tokens") else None,
        num_stored_tokens=message.num_stored_tokens if has_stored else None,
        **{name: getattr(message, name) for name in _EQUAL},
    )


def _requests(keys: Iterable[int]) -> list[RequestKey]:
    return cast("list[RequestKey]", list(keys))


def _concatenate(new_hashes: Sequence[Sequence[BlockHash]]) -> bytes:
    return b"".join(chain.from_iterable(new_hashes))


def _hashes_by_request(
    message: kvpool_pb2.Commit | kvpool_pb2.Lookup, where: str
) -> list[Sequence[BlockHash]]:
    hashes = block_hashes_from_proto(message.new_hashes, f"{where}.new_hashes")
    counts = message.num_new_hashes
    if sum(counts) != len(hashes):
        raise ops.MalformedTransaction(
            f"there are {len(hashes)} hashes, but num_new_hashes add up to {sum(counts)}",
            field=f"{where}.num_new_hashes",
        )
    by_request: list[Sequence[BlockHash]] = []
    start = 0
    for count in counts:
        by_request.append(hashes[start : start + count] if count else ())
        start += count
    return by_request


def _result_to_proto(result: ops.OperationResult | None) -> kvpool_pb2.OperationResult:
    match result:
        case ops.GrowResult(groups):
            return kvpool_pb2.OperationResult(
                grow=kvpool_pb2.GrowResult(groups=map(_blocks_to_proto, groups))
            )
        case ops.LookupResult(num_hit_tokens, shared_prefix_boundaries, divergent):
            return kvpool_pb2.OperationResult(
                lookup=kvpool_pb2.LookupResult(
                    num_hit_tokens=num_hit_tokens,
                    shared_prefix_boundaries=shared_prefix_boundaries,
                    num_divergent_hit_tokens=divergent,
                )
            )
        case ops.AdmitResult(groups):
            return kvpool_pb2.OperationResult(
                admit=kvpool_pb2.AdmitResult(groups=map(_blocks_to_proto, groups))
            )
        case ops.ResetPrefixCacheResult(done):
            return kvpool_pb2.OperationResult(
                reset_prefix_cache=kvpool_pb2.ResetPrefixCacheResult(done=done)
            )
        case None:
            return kvpool_pb2.OperationResult()


def _result_from_proto(message: kvpool_pb2.OperationResult) -> ops.OperationResult | None:
    match message.WhichOneof("result"):
        case "grow":
            return ops.GrowResult(tuple(map(_blocks_from_proto, message.grow.groups)))
        case "lookup":
            lookup = message.lookup
            return ops.LookupResult(
                list(lookup.num_hit_tokens),
                list(lookup.shared_prefix_boundaries),
                list(lookup.num_divergent_hit_tokens),
            )
        case "admit":
            return ops.AdmitResult(tuple(map(_blocks_from_proto, message.admit.groups)))
        case "reset_prefix_cache":
            return ops.ResetPrefixCacheResult(message.reset_prefix_cache.done)
        case None:
            return None


def _blocks_to_proto(blocks: ops.GroupBlocks) -> kvpool_pb2.GroupBlocks:
    return kvpool_pb2.GroupBlocks(num_blocks=blocks.num_blocks, block_ids=blocks.block_ids)


def _blocks_from_proto(message: kvpool_pb2.GroupBlocks) -> ops.GroupBlocks:
    return ops.GroupBlocks(message.num_blocks[:], cast("list[BlockId]", message.block_ids[:]))


def _stop_to_proto(stop: ops.Stop) -> kvpool_pb2.Stop:
    return kvpool_pb2.Stop(
        operation_index=stop.operation_index,
        item_index=stop.item_index,
        reason=_STOP_REASONS.to_proto(stop.reason),
        num_hit_tokens=stop.num_hit_tokens,
        shared_prefix_boundary=stop.shared_prefix_boundary,
    )


def _stop_from_proto(message: kvpool_pb2.Stop) -> ops.Stop:
    reason = _STOP_REASONS.from_proto(message.reason)
    if reason is None:
        raise ValueError(f"stop.reason: {message.reason} is not known here")
    return ops.Stop(
        message.operation_index,
        message.item_index,
        reason,
        message.num_hit_tokens,
        message.shared_prefix_boundary,
    )
