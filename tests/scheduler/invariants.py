"""Invariants of every planned step, computed from block tables, tokens and limits, independently of
the scheduler's reasons. They check a Story: a scheduler with the KV pool's real core, whose steps
are recorded.
"""

from collections import Counter
from dataclasses import dataclass

from services.common.pool.ids import NULL_BLOCK, RequestKey
from services.common.pool.kv_cache_groups import AttentionType
from services.scheduler.core.output import SchedulerOutput, WaitReason
from services.scheduler.core.policies import PROGRAM
from services.scheduler.core.request import Request
from tests.scheduler.policy_orders import ADMISSION_ORDERS, VICTIM_ORDERS
from tests.scheduler.story import Story


@dataclass(frozen=True, slots=True)
class Before:
    """The running and the waiting requests, each in their order, before a step is planned."""

    running: list[Request]
    waiting: list[Request]

    @classmethod
    def of(cls, story: Story) -> "Before":
        story.scheduler.queues.put_in_order()
        return cls(list(story.scheduler.running), list(story.scheduler.queues.waiting))


def check_step(story: Story, before: Before, plan: SchedulerOutput) -> None:
    check_budget(story, plan)
    check_rows(story)
    check_nothing_leaks(story)
    check_one_owner_of_writable_blocks(story)
    check_queue_order(story)
    check_no_request_passes_the_head(before, plan)
    check_the_head_waits_for_a_reason(story, plan)
    check_running_requests_are_served(story, before, plan)


def check_budget(story: Story, plan: SchedulerOutput) -> None:
    assert plan.num_tokens <= _budget(story)
    assert all(count > 0 for count in plan.num_scheduled_tokens)
    assert len(set(plan.requests)) == len(plan.requests)


def check_rows(story: Story) -> None:
    running = story.scheduler.running
    assert len(running) <= _num_rows(story)
    assert story.model.num_requests == len(running)
    assert not set(running) & set(story.scheduler.queues.waiting)


def check_nothing_leaks(story: Story) -> None:
    """Only running requests, and ended requests whose blocks the scheduling policy retains, have
    blocks. All other blocks are free.
    """
    core, scheduler = story.pool.core, story.scheduler
    held = () if scheduler.retention is None else scheduler.retention.held
    keys = [*(request.key for request in scheduler.running), *held]
    tables = [table for key in keys for table in core.block_tables(key)]
    assert core.stats().num_requests == len(set(keys)) == len(keys)
    assert all(tables)
    used = {block for table in tables for block in table if block != NULL_BLOCK}
    assert len(used) + core.num_free_blocks == core.config.num_blocks - 1


def check_one_owner_of_writable_blocks(story: Story) -> None:
    """A block with positions that a request will write belongs to no other request."""
    running, size = story.scheduler.running, story.config.block_size
    holders = Counter(
        block for request in running for table in _tables(story, request) for block in table
    )
    holders[NULL_BLOCK] = 1  # is in tables for blocks that a group does not need
    for request in running:
        assert request.row is not None
        written_next = story.model.next_position(request.row, request.num_computed_tokens)
        for table in _tables(story, request):
            writable = table[written_next // size :]
            assert all(holders[block] == 1 for block in writable), request.request_id


def check_queue_order(story: Story) -> None:
    if (rank := ADMISSION_ORDERS.get(story.config.policy)) is not None:
        ranks = [rank(request) for request in story.scheduler.queues.waiting]
        assert ranks == sorted(ranks)


def check_no_request_passes_the_head(before: Before, plan: SchedulerOutput) -> None:
    """Requests are admitted from the head of the queue. A step that preempts admits none."""
    admitted = list(plan.block_tables)
    assert admitted == before.waiting[: len(admitted)]
    assert sorted(map(id, admitted)) == sorted(map(id, plan.new + plan.resumed))
    assert not (admitted and plan.preempted)


def check_the_head_waits_for_a_reason(story: Story, plan: SchedulerOutput) -> None:
    """The head of the queue is admitted if a batch row, budget and blocks for it are left. It may
    wait for a recurrent state (of a state-space layer) that this step stores. While other requests
    run, it may also wait for the headroom (free blocks) that the policy `program` requires, or for
    blocks that the policy retains for paused programs.
    """
    config, running = story.config, story.scheduler.running
    head = next(iter(story.scheduler.queues.waiting), None)
    if head is None or plan.preempted or len(running) == _num_rows(story):
        return
    if plan.wait_reason is WaitReason.RETAINED:
        assert running
        return
    least = _least_chunk(story) if config.enable_chunked_prefill else head.num_tokens
    if _budget(story) - plan.num_tokens < least:
        return
    if _caches_states(story) and any(
        request.token_ids[: config.block_size] == head.token_ids[: config.block_size]
        for request in plan.requests
    ):
        return
    slots = head.num_tokens + config.num_speculative_tokens + config.num_lookahead_tokens
    blocks = len(config.groups) * -(-min(slots, config.max_model_len) // config.block_size)
    watermark = int(config.watermark * config.num_blocks) if running else 0
    if running and config.policy == PROGRAM:
        watermark += int(config.retention_headroom * (config.num_blocks - 1))
    assert story.pool.core.num_free_blocks < blocks + watermark, head.request_id


def check_running_requests_are_served(story: Story, before: Before, plan: SchedulerOutput) -> None:
    """Every step schedules tokens of the first running request, and of the others while budget
    remains. The request that the policy would preempt last is never preempted. So one running
    request after another reaches its end, until each waiting request has run.
    """
    if not before.running:
        return
    if (rank := VICTIM_ORDERS.get(story.config.policy)) is not None:
        assert min(before.running, key=rank) not in plan.preempted
    chunk = _least_chunk(story) if _keeps_states(story) else 1
    has_tokens_left = _budget(story) - plan.num_tokens >= chunk
    for request in before.running if has_tokens_left else before.running[:1]:
        assert (
            request in plan.requests
            or request in plan.preempted
            or _only_waits_for_tokens(story, request)
        ), request.request_id


def _budget(story: Story) -> int:
    return story.config.max_num_scheduled_tokens or story.config.max_num_batched_tokens


def _num_rows(story: Story) -> int:
    limits = (story.config.max_num_seqs, story.config.max_num_active_seqs)
    return min(limit for limit in limits if limit is not None)


def _only_waits_for_tokens(story: Story, request: Request) -> bool:
    """Whether a step in flight may sample the request's last token, so no step must follow."""
    return request.num_output_placeholders > 0 and (
        request.num_tokens + 1 >= request.max_num_tokens
        or request.num_computed_tokens + 1 >= story.config.max_model_len
    )


def _least_chunk(story: Story) -> int:
    """The smallest number of tokens that a step can schedule for a request: a block of tokens if
    the model has state-space layers, otherwise a token and its drafts.
    """
    config = story.config
    return config.block_size if _keeps_states(story) else 1 + config.num_speculative_tokens


def _caches_states(story: Story) -> bool:
    return story.config.enable_prefix_caching and _keeps_states(story)


def _keeps_states(story: Story) -> bool:
    kinds = {group.attention_type for group in story.config.groups}
    return AttentionType.STATE_SPACE in kinds


def _tables(story: Story, request: Request) -> tuple[tuple[int, ...], ...]:
    return story.pool.core.block_tables(RequestKey(request.key))
