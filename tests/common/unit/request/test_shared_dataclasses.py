"""Dataclasses that services exchange have the fields of their protobuf messages. A conversion to
the message and back does not change them.
"""

import enum
from dataclasses import dataclass, fields
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool import operations as ops
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import ContextId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.messages import kv_cache_group_from_proto, kv_cache_group_to_proto
from services.common.pool.operations_proto import (
    operation_to_proto,
    operations_from_proto,
    outcome_from_proto,
    outcome_to_proto,
)
from services.common.request.finish import FinishReason
from services.common.request.messages import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    pooler_from_proto,
    pooler_to_proto,
    pooling_from_proto,
    pooling_to_proto,
    prompt_embeds_from_proto,
    prompt_embeds_to_proto,
)
from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.rpc.proto import require_same_fields

MESSAGES = [
    (ops.BeginStep, kvpool_pb2.BeginStep),
    (ops.Release, kvpool_pb2.Release),
    (ops.RankContexts, kvpool_pb2.RankContexts),
    (ops.DropContexts, kvpool_pb2.DropContexts),
    (ops.ContextBlocks, kvpool_pb2.ContextBlocks),
    (ops.RemoveSkippedBlocks, kvpool_pb2.RemoveSkippedBlocks),
    (ops.Grow, kvpool_pb2.Grow),
    (ops.Commit, kvpool_pb2.Commit),
    (ops.Lookup, kvpool_pb2.Lookup),
    (ops.Admission, kvpool_pb2.Admission),
    (ops.Admit, kvpool_pb2.Admit),
    (ops.ResetPrefixCache, kvpool_pb2.ResetPrefixCache),
    (ops.EvictBlocks, kvpool_pb2.EvictBlocks),
    (ops.Stop, kvpool_pb2.Stop),
    (ops.GroupBlocks, kvpool_pb2.GroupBlocks),
    (ops.GrowResult, kvpool_pb2.GrowResult),
    (ops.LookupResult, kvpool_pb2.LookupResult),
    (ops.AdmitResult, kvpool_pb2.AdmitResult),
    (ops.ResetPrefixCacheResult, kvpool_pb2.ResetPrefixCacheResult),
    (ops.ReleaseCopies, kvpool_pb2.ReleaseCopies),
    (ops.BlockCopy, kvpool_pb2.BlockCopy),
    (ops.Outcome, kvpool_pb2.TransactResponse),
    (KVCacheGroup, common_pb2.KVCacheGroup),
    (PromptEmbeds, common_pb2.PromptEmbeds),
    (PoolingParams, common_pb2.PoolingParams),
    (Pooler, common_pb2.Pooler),
]

# Fields that only the messages have: the lengths of packed lists, the generation and number of a
# transaction, and the events.
WIRE_ONLY = {"num_new_hashes", "generation", "sequence", "events"}

HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]
BLOCKS = (ops.GroupBlocks([1, 2], [5, 6, 7]), ops.GroupBlocks([1, 0], [8]))

OPERATIONS = [
    ops.Release([1, 2], contexts=[]),
    ops.Release([1, 2], contexts=[0, 7]),
    ops.RankContexts([7, 3]),
    ops.DropContexts([3]),
    ops.RemoveSkippedBlocks([1, 2], [3, 4]),
    ops.BeginStep(),
    ops.Grow([1, 2], [3, 4], [5, 6], []),
    ops.Grow([1, 2], [3, 4], [5, 6], [5, 5]),
    ops.Commit([1, 2], [7, 8], [HASHES[:2], ()]),
    ops.Lookup([1, 2], [7, 8], [(), HASHES[1:]]),
    ops.Lookup([1], [7], [()], with_divergent_hits=True),
    ops.Admit([ops.Admission(1, 2, 3, 4, 5, 6, 7, HASHES, "00-a-b-01", resumed=True)]),
    ops.Admit([ops.Admission(1, 2, 2, 9, 9, 9, 0, [], num_retained_blocks=0, holds_blocks=True)]),
    ops.Admit([ops.Admission(1, 2, 2, 9, 9, 9, 0, [], num_blocks_kept_free=4)]),
    ops.Admit([ops.Admission(1, 2, 2, 9, 9, 9, 0, HASHES, num_external_tokens=5)]),
    ops.Admit([ops.Admission(1, 9, 8, 12, 9, 9, 0, [], num_tokens=0, num_prompt_tokens=9)]),
    ops.Admit([ops.Admission(1, 9, 8, 12, 9, 9, 0, [], shared_prefix_boundary=16)]),
    ops.Admit([ops.Admission(1, 9, 8, 12, 9, 9, 0, [], num_external_tokens=2, diverges=True)]),
    ops.ResetPrefixCache(),
    ops.ReleaseCopies(3),
    ops.EvictBlocks([3, 5]),
]
OUTCOME = ops.Outcome(
    num_free_blocks=9,
    results=(
        None,
        ops.GrowResult(BLOCKS),
        ops.LookupResult([4, 0], [0, 8], [8, 0]),
        ops.AdmitResult(BLOCKS),
        ops.ResetPrefixCacheResult(done=True),
    ),
    stop=ops.Stop(1, 2, ops.StopReason.HIT_CHANGED, 3, 8),
    block_ids_to_zero=(7, 8),
    copies=(ops.BlockCopy(1, 7, 8),),
)


@pytest.mark.parametrize(("shared", "message"), MESSAGES)
def test_a_dataclass_has_the_fields_of_its_message(shared: type[Any], message: type[Any]) -> None:
    names = set(message.DESCRIPTOR.fields_by_name)
    assert {field.name for field in fields(shared)} == names - WIRE_ONLY


def test_every_operation_and_result_of_the_contract_has_a_dataclass() -> None:
    names = {shared.__name__ for shared, _ in MESSAGES}
    for message in (kvpool_pb2.Operation, kvpool_pb2.OperationResult):
        assert {field.message_type.name for field in message.DESCRIPTOR.fields} <= names


def test_operations_keep_their_fields_on_the_wire() -> None:
    packed = [operation_to_proto(operation).SerializeToString() for operation in OPERATIONS]
    assert operations_from_proto(map(kvpool_pb2.Operation.FromString, packed)) == OPERATIONS


def test_an_outcome_keeps_its_fields_on_the_wire() -> None:
    packed = outcome_to_proto(OUTCOME, generation=1, sequence=2).SerializeToString()
    assert outcome_from_proto(kvpool_pb2.TransactResponse.FromString(packed)) == OUTCOME
    stop = ops.Stop(0, 1, ops.StopReason.RETAINED)
    contexts = (ops.ContextBlocks(ContextId(7), 3, 2), ops.ContextBlocks(ContextId(9), 0, 0))
    retained = ops.Outcome(8, (), stop, contexts=contexts, num_retained_blocks=5)
    packed = outcome_to_proto(retained, generation=1, sequence=2).SerializeToString()
    assert outcome_from_proto(kvpool_pb2.TransactResponse.FromString(packed)) == retained


def test_an_outcome_gives_the_blocks_of_each_request() -> None:
    assert OUTCOME.grown == OUTCOME.admitted == [([5], [8]), ([6, 7], [])]
    assert OUTCOME.hits == [(4, 0), (0, 8)]
    assert OUTCOME.reset_done
    assert not ops.Outcome(9).reset_done


@pytest.mark.parametrize("kind", AttentionType)
def test_a_group_keeps_its_fields_on_the_wire(kind: enum.Enum) -> None:
    group = KVCacheGroup(kind, block_size=16, window=64, num_layers=3)
    assert kv_cache_group_from_proto(kv_cache_group_to_proto(group)) == group


def test_a_group_of_an_unknown_kind_is_none() -> None:
    assert kv_cache_group_from_proto(common_pb2.KVCacheGroup(block_size=16)) is None


@pytest.mark.parametrize("reason", FinishReason)
def test_a_finish_reason_has_a_number(reason: FinishReason) -> None:
    assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason


@pytest.mark.parametrize("dtype", EmbedsDtype)
def test_embeddings_keep_their_fields_on_the_wire(dtype: EmbedsDtype) -> None:
    embeds = PromptEmbeds(2, dtype, bytes(range(16)))
    assert prompt_embeds_from_proto(prompt_embeds_to_proto(embeds)) == embeds


def test_a_field_without_its_counterpart_is_refused() -> None:
    @dataclass
    class Lacking:
        block_size: int
        window: int
        num_layers: int
        is_eagle_group: bool
        mamba_cache_mode: int
        num_speculative_blocks: int
        dilation: int

    with pytest.raises(TypeError, match=r"\['attention_type', 'dilation'\]"):
        require_same_fields(Lacking, common_pb2.KVCacheGroup.DESCRIPTOR)


def test_poolers_and_their_parameters_survive_the_wire() -> None:
    for params in (PoolingParams(), PoolingParams(8, False, 3), PoolingParams(0, True)):
        message = pooling_to_proto(params)
        assert message is not None
        assert pooling_from_proto(message) == params
    for task in PoolingTask:
        for kind in PoolingType:
            pooler = Pooler(task, kind, 48, True, (4, 8), True)
            described = pooler_to_proto(pooler)
            assert described is not None
            assert pooler_from_proto(described) == pooler
    assert pooler_from_proto(common_pb2.Pooler()) is None
