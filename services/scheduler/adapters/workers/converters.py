"""Converts steps to messages of stepwell.worker.v1, and the responses to outputs of steps."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import cast

from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import cache_key, pack_token_ids, unpack_token_ids
from services.common.pool.operations import BlockTables
from services.common.request.messages import (
    pooling_to_proto,
    prompt_embeds_to_proto,
    sampling_to_proto,
)
from services.scheduler.adapters.workers.answer_check import ExpectedAnswer
from services.scheduler.core.kv_transfer import NO_RESULTS, KVTransferResults
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from services.scheduler.core.timelines.timeline import RequestTimes


def scheduler_output_to_proto(
    plan: SchedulerOutput, generation: int, traceparent: str
) -> worker_pb2.ExecuteRequest:
    """Converts a step to a message that describes how the workers' batch changes."""
    request = worker_pb2.ExecuteRequest(
        generation=generation,
        step=plan.step,
        rows=pack_token_ids(_rows(plan.requests)),
        num_scheduled_tokens=pack_token_ids(plan.num_scheduled_tokens),
        num_computed_tokens=pack_token_ids(plan.num_computed_tokens),
        traceparent=traceparent,
    )
    if plan.removed_rows:
        request.removed_rows = pack_token_ids(plan.removed_rows)
    if plan.block_tables:
        request.new_requests.extend(_new_requests(plan))
    if plan.appended_blocks:
        request.appended_blocks.extend(_appended(plan.appended_blocks))
    if plan.draft_token_ids:
        _add_drafts(request, plan)
    if plan.block_ids_to_zero:
        request.block_ids_to_zero = pack_token_ids(plan.block_ids_to_zero)
    if plan.copies:
        request.copy_sources = pack_token_ids([copy.source for copy in plan.copies])
        request.copy_targets = pack_token_ids([copy.target for copy in plan.copies])
    return request


def last_token_ids(plan: SchedulerOutput) -> bytes:
    """The last scheduled token of each request, packed. Used with several pipeline stages, where a
    request is scheduled only if all its tokens have been sampled.
    """
    counts = zip(plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
    return pack_token_ids(
        [request.token_ids[computed + scheduled - 1] for request, computed, scheduled in counts]
    )


def num_stages(description: worker_pb2.DescribeResponse) -> int:
    return description.pipeline_parallel_size or 1


def model_runner_output_from_proto(
    response: worker_pb2.ExecuteResponse,
    kv_transfers: KVTransferResults = NO_RESULTS,
    num_speculative_tokens: int = 0,
    expected: ExpectedAnswer | None = None,
) -> ModelRunnerOutput:
    """Converts the last rank's response to a step, and adds the transfer results of all ranks. Adds
    `num_speculative_tokens` placeholders for drafts to each request with sampled tokens, because
    workers propose the drafts only in the next step. Raises ValueError for arrays of wrong lengths,
    and for a response that contradicts `expected`.
    """
    num_tokens = unpack_token_ids(response.num_tokens)
    token_ids = unpack_token_ids(response.token_ids)
    output = ModelRunnerOutput(
        _sampled(token_ids, num_tokens),
        num_draft_tokens=unpack_token_ids(response.num_draft_tokens),
        execute_nanos=response.execute_nanos,
        slack_seconds=response.slack_nanos / 1e9 if response.HasField("slack_nanos") else None,
        kv_transfers=kv_transfers,
    )
    if num_speculative_tokens:
        output.draft_token_ids = [
            [-1] * num_speculative_tokens if count else [] for count in num_tokens
        ]
    if response.logprobs:
        output.logprobs = {item.index: item for item in response.logprobs}
    if response.nan_requests:
        output.nan_requests = frozenset(unpack_token_ids(response.nan_requests))
    if response.refused_requests:
        _take_refused(output, response)
    if response.pooled:
        output.pooled = {item.index: item.values for item in response.pooled}
    if expected is not None:
        expected.check(output, num_tokens, token_ids)
    return output


def request_times_to_proto(times: RequestTimes | None) -> scheduler_pb2.RequestTimes | None:
    """Converts the parts of a request's total time. None if they were not measured. A part during
    which the machine's clock was set back becomes 0.
    """
    if times is None:
        return None
    return scheduler_pb2.RequestTimes(
        queue_nanos=max(0, times.queue_nanos),
        prefill_nanos=max(0, times.prefill_nanos),
        decode_nanos=max(0, times.decode_nanos),
        interrupted_nanos=max(0, times.interrupted_nanos),
        queued_unix_nanos=times.queued_unix_nanos,
        parts=[
            scheduler_pb2.TimePart(
                name=part.name,
                nanos=max(0, part.nanos),
                waited_for=part.request_id,
                step=part.step,
            )
            for part in times.parts
        ],
    )


def _take_refused(output: ModelRunnerOutput, response: worker_pb2.ExecuteResponse) -> None:
    """Sets the refused tokens and grammar errors. Drops the refused tokens and all after them."""
    requests = unpack_token_ids(response.refused_requests)
    refused = dict(zip(requests, unpack_token_ids(response.refused_tokens), strict=True))
    output.token_ids = [
        tokens[: refused.get(index, len(tokens))] for index, tokens in enumerate(output.token_ids)
    ]
    output.refused_tokens = refused
    output.grammar_errors = {item.index: item.message for item in response.grammar_errors}


def _sampled(flat: list[int], counts: list[int]) -> list[Sequence[int]]:
    """Splits the tokens by request. Fast in the usual case of one token for each request."""
    if len(flat) == len(counts) == counts.count(1):
        return [[token] for token in flat]
    ends = list(accumulate(counts))
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _add_drafts(request: worker_pb2.ExecuteRequest, plan: SchedulerOutput) -> None:
    drafts = [plan.draft_token_ids.get(scheduled, []) for scheduled in plan.requests]
    request.num_draft_tokens = pack_token_ids(list(map(len, drafts)))
    request.draft_token_ids = pack_token_ids(list(chain.from_iterable(drafts)))


def _rows(requests: Iterable[Request]) -> list[int]:
    rows = [request.row for request in requests]
    if None in rows:
        raise AssertionError("a request is planned without a row")
    return cast(list[int], rows)


def _new_requests(plan: SchedulerOutput) -> list[worker_pb2.NewRequest]:
    computed = dict(zip(plan.requests, plan.num_computed_tokens, strict=True))
    return [
        _new_request(request, tables, computed[request])
        for request, tables in plan.block_tables.items()
    ]


def _new_request(
    request: Request, tables: BlockTables, num_computed_tokens: int
) -> worker_pb2.NewRequest:
    embeds = request.prompt_embeds
    return worker_pb2.NewRequest(
        row=_rows([request])[0],
        token_ids=pack_token_ids(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling_to_proto(request.sampling),
        block_tables=[worker_pb2.BlockTable(block_ids=pack_token_ids(ids)) for ids in tables],
        prompt_embeds=prompt_embeds_to_proto(embeds and embeds.rest(num_computed_tokens)),
        num_placeholders=embeds.num_tokens if embeds is not None else 0,
        adapter_digest=request.adapter_digest,
        cache_key=cache_key(request.cache_salt, request.adapter_digest),
        pooling=pooling_to_proto(request.pooling),
    )


def _appended(blocks: Mapping[Request, BlockTables]) -> list[worker_pb2.AppendedBlocks]:
    rows = pack_token_ids(_rows(blocks))
    return [
        worker_pb2.AppendedBlocks(
            rows=rows,
            num_blocks=pack_token_ids([len(ids) for ids in of_group]),
            block_ids=pack_token_ids([block for ids in of_group for block in ids]),
        )
        for of_group in zip(*blocks.values(), strict=True)
    ]
