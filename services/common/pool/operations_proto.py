"""Converts pool transactions from and to the messages of stepwell.kvpool.v1."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, cast

from google.protobuf.message import Message
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool import operations as ops
from services.common.pool.block_hash import HASH_BYTES, BlockHash
from services.common.pool.ids import BlockId, ContextId
from services.common.rpc.proto import ProtoEnum

_STOP_REASONS = ProtoEnum(ops.StopReason, kvpool_pb2.StopReason, "STOP_REASON_")
_OPERATIONS: dict[str, tuple[type[Any], type[Message]]] = {
    "release": (ops.Release, kvpool_pb2.Release),
    "remove_skipped_blocks": (ops.RemoveSkippedBlocks, kvpool_pb2.RemoveSkippedBlocks),
    "grow": (ops.Grow, kvpool_pb2.Grow),
    "commit": (ops.Commit, kvpool_pb2.Commit),
    "lookup": (ops.Lookup, kvpool_pb2.Lookup),
    "admit": (ops.Admit, kvpool_pb2.Admit),
    "reset_prefix_cache": (ops.ResetPrefixCache, kvpool_pb2.ResetPrefixCache),
    "evict_blocks": (ops.EvictBlocks, kvpool_pb2.EvictBlocks),
    "begin_step": (ops.BeginStep, kvpool_pb2.BeginStep),
    "release_copies": (ops.ReleaseCopies, kvpool_pb2.ReleaseCopies),
    "rank_contexts": (ops.RankContexts, kvpool_pb2.RankContexts),
    "drop_contexts": (ops.DropContexts, kvpool_pb2.DropContexts),
}
"""Maps each field of the message Operation to a dataclass and a message with equal fields."""
_RESULTS: dict[str, tuple[type[Any], type[Message]]] = {
    "grow": (ops.GrowResult, kvpool_pb2.GrowResult),
    "lookup": (ops.LookupResult, kvpool_pb2.LookupResult),
    "admit": (ops.AdmitResult, kvpool_pb2.AdmitResult),
    "reset_prefix_cache": (ops.ResetPrefixCacheResult, kvpool_pb2.ResetPrefixCacheResult),
}
"""Maps each field of the message OperationResult to a dataclass and a message."""
_KINDS = {
    own: (kind, message) for kind, (own, message) in (*_OPERATIONS.items(), *_RESULTS.items())
}
_NAMES = {own: tuple(one.name for one in fields(own)) for own in _KINDS}


def operation_to_proto(operation: ops.Operation) -> kvpool_pb2.Operation:
    kind, message = _KINDS[type(operation)]
    values = {name: getattr(operation, name) for name in _NAMES[type(operation)]}
    if (new_hashes := values.get("new_hashes")) is not None:
        values["num_new_hashes"] = [len(hashes) for hashes in new_hashes]
        values["new_hashes"] = b"".join(chain.from_iterable(new_hashes))
    elif kind == "admit":
        values["admissions"] = map(_admission_to_proto, values["admissions"])
    part: dict[str, Any] = {kind: message(**values)}
    return kvpool_pb2.Operation(**part)


def operations_from_proto(messages: Iterable[kvpool_pb2.Operation]) -> list[ops.Operation]:
    """Converts a transaction's operations. Raises MalformedTransaction, which names the field."""
    return [
        _operation_from_proto(message, f"operations[{index}]")
        for index, message in enumerate(messages)
    ]


def outcome_to_proto(
    outcome: ops.Outcome, generation: int, sequence: int
) -> kvpool_pb2.TransactResponse:
    """Converts the outcome of transaction `sequence` of a pool's generation."""
    message = kvpool_pb2.TransactResponse(
        generation=generation,
        sequence=sequence,
        results=map(_result_to_proto, outcome.results),
        stop=None if outcome.stop is None else _stop_to_proto(outcome.stop),
        num_free_blocks=outcome.num_free_blocks,
    )
    if outcome.block_ids_to_zero or outcome.copies:  # only with state-space layers
        message.block_ids_to_zero.extend(outcome.block_ids_to_zero)
        message.copies.extend(
            kvpool_pb2.BlockCopy(group=copy.group, source=copy.source, target=copy.target)
            for copy in outcome.copies
        )
    if outcome.contexts or outcome.num_retained_blocks:
        message.num_retained_blocks = outcome.num_retained_blocks
        message.contexts.extend(
            kvpool_pb2.ContextBlocks(
                context=one.context, num_blocks=one.num_blocks, num_own_blocks=one.num_own_blocks
            )
            for one in outcome.contexts
        )
    return message


def outcome_from_proto(message: kvpool_pb2.TransactResponse) -> ops.Outcome:
    """Converts a response to an outcome. Raises ValueError for an unknown stop reason."""
    stop = _stop_from_proto(message.stop) if message.HasField("stop") else None
    results = tuple(map(_result_from_proto, message.results))
    if not (message.block_ids_to_zero or message.copies):  # usual without state-space layers
        outcome = ops.Outcome(message.num_free_blocks, results, stop)
        if message.contexts or message.num_retained_blocks:
            outcome.num_retained_blocks = message.num_retained_blocks
            outcome.contexts = tuple(
                ops.ContextBlocks(ContextId(one.context), one.num_blocks, one.num_own_blocks)
                for one in message.contexts
            )
        return outcome
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
            f"{len(packed)} bytes are not a whole number of hashes of {HASH_BYTES} bytes",
            field=field,
        )
    return [
        BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)
    ]


def _operation_from_proto(message: kvpool_pb2.Operation, where: str) -> ops.Operation:
    kind = message.WhichOneof("operation")
    if kind is None:
        raise ops.MalformedTransaction(
            "the operation is not set, or of an unknown kind", field=where
        )
    own, _ = _OPERATIONS[kind]
    part, where = getattr(message, kind), f"{where}.{kind}"
    values: list[Any] = []
    for name in _NAMES[own]:
        value = getattr(part, name)
        if name == "new_hashes":
            value = _hashes_by_request(part, where)
        elif name == "admissions":
            value = [
                _admission_from_proto(admission, f"{where}.admissions[{index}]")
                for index, admission in enumerate(value)
            ]
        elif not isinstance(value, int):
            value = list(value)
        values.append(value)
    return cast("ops.Operation", own(*values))


_OPTIONAL = "num_tokens", "num_stored_tokens", "num_retained_blocks"
_CONVERTED = {"new_hashes", *_OPTIONAL}
_EQUAL = [one.name for one in fields(ops.Admission) if one.name not in _CONVERTED]
"""The fields of an admission that its message has with the same name, type and default."""


def _admission_to_proto(admission: ops.Admission) -> kvpool_pb2.Admission:
    return kvpool_pb2.Admission(
        new_hashes=b"".join(admission.new_hashes),
        **{name: getattr(admission, name) for name in (*_EQUAL, *_OPTIONAL)},
    )


def _admission_from_proto(message: kvpool_pb2.Admission, where: str) -> ops.Admission:
    given = (name for name in _OPTIONAL if message.HasField(name))  # type: ignore[arg-type]
    return ops.Admission(
        new_hashes=block_hashes_from_proto(message.new_hashes, f"{where}.new_hashes"),
        **{name: getattr(message, name) for name in (*_EQUAL, *given)},
    )


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
    if result is None:
        return kvpool_pb2.OperationResult()
    kind, message = _KINDS[type(result)]
    values = {name: getattr(result, name) for name in _NAMES[type(result)]}
    if "groups" in values:
        values["groups"] = map(_blocks_to_proto, values["groups"])
    part: dict[str, Any] = {kind: message(**values)}
    return kvpool_pb2.OperationResult(**part)


def _result_from_proto(message: kvpool_pb2.OperationResult) -> ops.OperationResult | None:
    kind = message.WhichOneof("result")
    if kind is None:
        return None
    part, (own, _) = getattr(message, kind), _RESULTS[kind]
    if kind in ("grow", "admit"):
        return cast("ops.OperationResult", own(tuple(map(_blocks_from_proto, part.groups))))
    values = [getattr(part, name) for name in _NAMES[own]]
    lists = [value if isinstance(value, bool) else list(value) for value in values]
    return cast("ops.OperationResult", own(*lists))


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
        raise ValueError(f"stop.reason: {message.reason} is unknown")
    return ops.Stop(
        message.operation_index,
        message.item_index,
        reason,
        message.num_hit_tokens,
        message.shared_prefix_boundary,
    )
