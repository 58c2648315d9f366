"""Between step plans and the messages of stepwell.worker.v1."""

from collections.abc import Mapping, Sequence

from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.block_hash import pack_token_ids, unpack_token_ids
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.ports import BlockTables
from services.scheduler.core.request import Request


def to_execute_request(
    plan: StepPlan, generation: int, traceparent: str
) -> worker_pb2.ExecuteRequest:
    """The step as a difference to the workers' batch."""
    return worker_pb2.ExecuteRequest(
        generation=generation,
        step=plan.step,
        removed_slots=pack_token_ids(plan.removed_slots),
        new_requests=[
            _new_request(request, tables) for request, tables in plan.block_tables.items()
        ],
        slots=pack_token_ids([_slot(request) for request in plan.requests]),
        num_scheduled_tokens=pack_token_ids(plan.num_scheduled_tokens),
        num_computed_tokens=pack_token_ids(plan.num_computed_tokens),
        appended_blocks=_appended(plan.appended_blocks),
        traceparent=traceparent,
        block_ids_to_zero=pack_token_ids(plan.block_ids_to_zero),
    )


def to_step_output(response: worker_pb2.ExecuteResponse) -> StepOutput:
    """What came of the step."""
    token_ids: list[Sequence[int]] = []
    flat, start = unpack_token_ids(response.token_ids), 0
    for count in unpack_token_ids(response.num_tokens):
        token_ids.append(flat[start : start + count])
        start += count
    return StepOutput(
        token_ids,
        logprobs={item.index: item for item in response.logprobs},
        nan_requests=frozenset(unpack_token_ids(response.nan_requests)),
    )


def _slot(request: Request) -> int:
    if request.slot is None:
        raise AssertionError(f"{request.request_id} is planned without a slot")
    return request.slot


def _new_request(request: Request, tables: BlockTables) -> worker_pb2.NewRequest:
    if not isinstance(request.sampling, common_pb2.SamplingParams):
        raise AssertionError(f"{request.request_id} came without sampling parameters")
    return worker_pb2.NewRequest(
        slot=_slot(request),
        token_ids=pack_token_ids(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        block_tables=[worker_pb2.BlockTable(block_ids=pack_token_ids(ids)) for ids in tables],
        traceparent=request.traceparent,
    )


def _appended(blocks: Mapping[Request, BlockTables]) -> list[worker_pb2.AppendedBlocks]:
    if not blocks:
        return []
    slots = pack_token_ids([_slot(request) for request in blocks])
    return [
        worker_pb2.AppendedBlocks(
            slots=slots,
            num_blocks=pack_token_ids([len(ids) for ids in of_group]),
            block_ids=pack_token_ids([block for ids in of_group for block in ids]),
        )
        for of_group in zip(*blocks.values(), strict=True)
    ]
