"""Converts requests, steps and outputs between the services' own types, without protobufs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.common.pool.block_hash import cache_key
from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import BlockTables
from services.gateway.core.request.request import EngineRequest
from services.scheduler.core.kv_transfer import (
    BlockTransfer,
    KVConnectorMetadata,
    KVTransferResults,
)
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from services.worker.backends.arrays import Int32Array
from services.worker.core.step import (
    AppendedBlocks,
    NewRequest,
    StepInput,
    StepOutput,
    TierBlocks,
    TierLoad,
)

_GENERATION = 1


def to_request(asked: EngineRequest, key: int) -> Request:
    """Converts the gateway's request to the scheduler's. `key` is its key in the KV pool."""
    return Request(
        request_id=asked.request_id,
        key=RequestKey(key),
        token_ids=list(asked.prompt_token_ids),
        num_prompt_tokens=len(asked.prompt_token_ids),
        arrival_time=asked.arrival_unix_nanos / 1e9,
        sampling=asked.sampling,
    )


def to_step(plan: SchedulerOutput) -> StepInput:
    """Converts the scheduler's plan to the worker's step."""
    return StepInput(
        generation=_GENERATION,
        step=plan.step,
        rows=_ints([request.row for request in plan.requests]),
        num_scheduled_tokens=_ints(plan.num_scheduled_tokens),
        num_computed_tokens=_ints(plan.num_computed_tokens),
        removed_rows=_ints(plan.removed_rows),
        new_requests=tuple(
            _new_request(request, tables) for request, tables in plan.block_tables.items()
        ),
        appended_blocks=_appended(plan.appended_blocks),
        **_drafts(plan),
        **_tier_transfers(plan.kv_connector_metadata),
    )


def _drafts(plan: SchedulerOutput) -> dict[str, Any]:
    """The fields of the worker's step that contain the plan's draft tokens."""
    drafts = plan.draft_token_ids
    if not drafts:
        return {}
    each = [drafts.get(request, []) for request in plan.requests]
    return {
        "num_draft_tokens": _ints([len(own) for own in each]),
        "draft_token_ids": _ints([draft for own in each for draft in own]),
    }


def _tier_transfers(metadata: KVConnectorMetadata | None) -> dict[str, Any]:
    """The fields of the worker's step with the blocks to copy to and from the host-memory tier."""
    if metadata is None:
        return {}
    return {
        "tier_stores": _tier_blocks(metadata.stores) if metadata.stores else None,
        "tier_loads": tuple(
            TierLoad(load.request, _tier_blocks(load.blocks)) for load in metadata.loads
        ),
    }


def _tier_blocks(transfers: Sequence[BlockTransfer]) -> TierBlocks:
    return TierBlocks(
        _ints([transfer.block for transfer in transfers]),
        _ints([transfer.tier_block for transfer in transfers]),
        tuple(transfer.key for transfer in transfers),
    )


def _new_request(request: Request, tables: BlockTables) -> NewRequest:
    if request.row is None:
        raise AssertionError(f"{request.request_id} is not ready to be sent")
    return NewRequest(
        row=request.row,
        token_ids=_ints(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        block_tables=tuple(_ints(table) for table in tables),
        cache_key=cache_key(request.cache_salt, request.adapter_digest),
    )


def _appended(blocks: Mapping[Request, BlockTables]) -> tuple[AppendedBlocks, ...]:
    rows = _ints([request.row for request in blocks])
    return tuple(
        AppendedBlocks(
            rows,
            _ints([len(ids) for ids in of_group]),
            _ints([block for ids in of_group for block in ids]),
        )
        for of_group in zip(*blocks.values(), strict=True)
    )


def to_output(output: StepOutput) -> ModelRunnerOutput:
    """Converts the worker's output to the scheduler's."""
    token_ids: list[list[int]] = []
    flat, start = output.token_ids.tolist(), 0
    for count in output.num_tokens.tolist():
        token_ids.append(flat[start : start + count])
        start += count
    transfers = KVTransferResults(
        [RequestKey(load.request) for load in output.ended_tier_loads],
        invalid_block_ids=[
            BlockId(block)
            for load in output.ended_tier_loads
            for block in load.invalid_block_ids.tolist()
        ],
    )
    return ModelRunnerOutput(
        token_ids, nan_requests=frozenset(output.nan_requests), kv_transfers=transfers
    )


def _ints(values: Sequence[int | None]) -> Int32Array:
    return np.array(values, np.int32)
