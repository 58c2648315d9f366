"""Converts between protobuf messages and the core's types. Arrays share the messages' memory."""

import sys
from dataclasses import fields
from zlib import crc32

import numpy as np
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import HASH_BYTES
from services.common.pool.messages import kv_cache_group_to_proto
from services.common.request.messages import (
    pooler_to_proto,
    pooling_from_proto,
    prompt_embeds_from_proto,
    sampling_from_proto,
)
from services.common.rpc.protocol import own_release
from services.worker.backends.arrays import Int32Array
from services.worker.core import step
from services.worker.core.errors import InvalidStep
from services.worker.core.worker import WorkerDescription
from services.worker.sampling.logprobs import LogprobRows

KEY_BYTES = HASH_BYTES + 4
"""The number of bytes of a key in the tier of host memory: a block hash and a KV-cache group."""

_INT32_BYTES = 4
_INT32 = np.dtype("<i4")
_NO_INTS = step.no_ints()
_NO_INTS.flags.writeable = False


def step_from_proto(
    message: worker_pb2.ExecuteRequest, *, with_digest: bool = False
) -> step.StepInput:
    """Decodes a step. Raises InvalidStep if a packed array is malformed."""
    return step.StepInput(
        generation=message.generation,
        step=message.step,
        rows=_array(message.rows, "rows"),
        num_scheduled_tokens=_array(message.num_scheduled_tokens, "num_scheduled_tokens"),
        num_computed_tokens=_array(message.num_computed_tokens, "num_computed_tokens"),
        removed_rows=_array(message.removed_rows, "removed_rows"),
        new_requests=tuple(map(_new_request, message.new_requests)),
        appended_blocks=tuple(map(_appended_blocks, message.appended_blocks)),
        num_draft_tokens=_array(message.num_draft_tokens, "num_draft_tokens"),
        draft_token_ids=_array(message.draft_token_ids, "draft_token_ids"),
        block_ids_to_zero=_array(message.block_ids_to_zero, "block_ids_to_zero"),
        copy_sources=_array(message.copy_sources, "copy_sources"),
        copy_targets=_array(message.copy_targets, "copy_targets"),
        last_token_ids=_array(message.last_token_ids, "last_token_ids"),
        tier_stores=_tier_blocks(message.tier_stores, "tier_stores")
        if message.HasField("tier_stores")
        else None,
        tier_loads=tuple(map(_tier_load, message.tier_loads)),
        digest=crc32(message.SerializeToString()) if with_digest else 0,
    )


def step_output_to_proto(
    output: step.StepOutput, *, queue_nanos: int, execute_nanos: int, slack_nanos: int | None = None
) -> worker_pb2.ExecuteResponse:
    message = worker_pb2.ExecuteResponse(
        generation=output.generation,
        step=output.step,
        num_tokens=_packed(output.num_tokens),
        token_ids=_packed(output.token_ids),
        queue_nanos=queue_nanos,
        execute_nanos=execute_nanos,
        slack_nanos=slack_nanos,
    )
    if output.logprobs:
        message.logprobs.extend(
            worker_pb2.RequestLogprobs(
                index=index, sampled=_logprobs(of.sampled), prompt=_logprobs(of.prompt)
            )
            for index, of in output.logprobs.items()
        )
    if len(output.nan_requests):
        message.nan_requests = _packed(output.nan_requests)
    if output.refused_tokens:
        message.refused_requests = _packed(np.array(list(output.refused_tokens), np.int32))
        message.refused_tokens = _packed(np.array(list(output.refused_tokens.values()), np.int32))
        message.grammar_errors.extend(
            worker_pb2.GrammarError(index=index, message=error)
            for index, error in output.grammar_errors.items()
        )
    if output.pooled:
        message.pooled.extend(
            worker_pb2.PooledVector(index=index, values=vector.astype("<f4", copy=False).tobytes())
            for index, vector in output.pooled.items()
        )
    if len(output.num_draft_tokens):
        message.num_draft_tokens = _packed(output.num_draft_tokens)
    if output.ended_tier_loads:
        message.ended_tier_loads.extend(
            worker_pb2.EndedTierLoad(
                request=load.request, invalid_block_ids=_packed(load.invalid_block_ids)
            )
            for load in output.ended_tier_loads
        )
    return message


def description_to_proto(description: WorkerDescription) -> worker_pb2.DescribeResponse:
    """Encodes the response of the RPC Describe, whose fields are named like the description's."""
    values = {field.name: getattr(description, field.name) for field in fields(description)}
    block_size, pooler = values.pop("block_size"), values.pop("pooler")
    longest = description.max_model_len
    groups = (group.kv_cache_group(block_size, longest) for group in values.pop("groups"))
    return worker_pb2.DescribeResponse(
        groups=[kv_cache_group_to_proto(group) for group in groups],
        pooler=pooler_to_proto(pooler),
        release=own_release(),
        **values,
    )


def _new_request(message: worker_pb2.NewRequest) -> step.NewRequest:
    return step.NewRequest(
        row=message.row,
        token_ids=_array(message.token_ids, "new_requests.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        block_tables=tuple(
            _array(table.block_ids, "new_requests.block_tables") for table in message.block_tables
        ),
        prompt_embeds=prompt_embeds_from_proto(message.prompt_embeds)
        if message.HasField("prompt_embeds")
        else None,
        num_placeholders=message.num_placeholders,
        pooling=pooling_from_proto(message.pooling) if message.HasField("pooling") else None,
        adapter_digest=message.adapter_digest,
        cache_key=message.cache_key,
    )


def _appended_blocks(message: worker_pb2.AppendedBlocks) -> step.AppendedBlocks:
    return step.AppendedBlocks(
        _array(message.rows, "appended_blocks.rows"),
        _array(message.num_blocks, "appended_blocks.num_blocks"),
        _array(message.block_ids, "appended_blocks.block_ids"),
    )


def _tier_load(message: worker_pb2.TierLoad) -> step.TierLoad:
    return step.TierLoad(message.request, _tier_blocks(message.blocks, "tier_loads.blocks"))


def _tier_blocks(message: worker_pb2.TierBlocks, field: str) -> step.TierBlocks:
    keys = message.keys
    if len(keys) % KEY_BYTES:
        problem = f"{len(keys)} bytes are no keys of {KEY_BYTES}"
        raise InvalidStep(f"{field}.keys: {problem}", field=f"{field}.keys")
    return step.TierBlocks(
        _array(message.block_ids, f"{field}.block_ids"),
        _array(message.tier_block_ids, f"{field}.tier_block_ids"),
        tuple(keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)),
    )


def _logprobs(rows: LogprobRows | None) -> common_pb2.Logprobs | None:
    if rows is None:
        return None
    return common_pb2.Logprobs(
        width=rows.width,
        token_ids=rows.token_ids.ravel().tolist(),
        logprobs=rows.logprobs.ravel().tolist(),
        ranks=rows.ranks.tolist(),
    )


def _array(packed: bytes, field: str) -> Int32Array:
    if not packed:
        return _NO_INTS
    if len(packed) % _INT32_BYTES:
        raise InvalidStep(f"{field}: {len(packed)} bytes are no int32 array", field=field)
    array = np.frombuffer(packed, _INT32)
    return array if sys.byteorder == "little" else array.astype(np.int32)


def _packed(values: Int32Array) -> bytes:
    return values.astype(_INT32, copy=False).tobytes()
