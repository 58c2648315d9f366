"""Steady steps: every running request computes one token, and no request begins or ends.

A simulation skips steady steps without planning them, because it can compute their outputs. One
transaction allocates and publishes (caches for prefix hits) the blocks of all skipped steps.
"""

from bisect import bisect_right
from collections.abc import Sequence

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler


def num_steady_steps(scheduler: Scheduler, plan: SchedulerOutput, max_num_blocks: int) -> int:
    """The number of steady steps that follow `plan` if no request arrives or is aborted, limited to
    steps that together need at most `max_num_blocks` free blocks. `plan` must be the last planned
    step, and the only step in flight. 0 if `plan` itself is not steady, or if the configuration has
    sliding windows, states, partial hits or drafts.
    """
    config, running, num_requests = scheduler.config, scheduler.running, len(plan.requests)
    is_steady = (
        plan.num_tokens == num_requests == len(running)
        and plan.wait_reason is None
        and not (plan.new or plan.resumed or plan.is_special or running.has_off_fast_path)
        and scheduler.is_steady
        and config.foretells_hits
        and not config.num_speculative_tokens
    )
    if not is_steady or not num_requests:
        return 0
    computed = [start + 1 for start in plan.num_computed_tokens]
    longest = min(
        request.max_num_tokens - num for request, num in zip(plan.requests, computed, strict=True)
    )
    held = [request.num_slots for request in plan.requests]
    size, num_slots = config.block_size, scheduler.kv_cache_manager.num_slots

    def num_new_blocks(num_steps: int) -> int:
        return sum(
            max(0, -(-(num_slots(num + num_steps) - slots) // size))
            for num, slots in zip(computed, held, strict=True)
        )

    # The steps of a request's last two tokens are not skipped.
    num_steps = max(0, longest - 2)
    if num_new_blocks(num_steps) <= max_num_blocks:
        return num_steps
    return bisect_right(range(num_steps), max_num_blocks, key=num_new_blocks) - 1


def next_is_empty(scheduler: Scheduler) -> bool:
    """Whether a step planned now would be empty, because the step in flight samples the last token
    of every running request, and no other request or pool operation waits.
    """
    return scheduler.is_steady and all(
        len(request.token_ids) + 1 >= request.max_num_tokens
        and request.num_computed_tokens >= len(request.token_ids)
        for request in scheduler.running
    )


async def skip_steps(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    num_steps: int,
    token_ids: Sequence[Sequence[int]],
) -> None:
    """Changes the scheduler, its pool and `plan` as if `num_steps` further steps had been planned
    and their outputs applied. `token_ids` contains `num_steps` sampled tokens for each request of
    the plan. No token may end a request.
    """
    for request, tokens in zip(plan.requests, token_ids, strict=True):
        request.token_ids += tokens
    plan.appended_blocks = {}
    plan.step += num_steps
    plan.num_computed_tokens = [count + num_steps for count in plan.num_computed_tokens]
    scheduler.running.skip(num_steps)
    scheduler.steps.skip(num_steps)
    await scheduler.kv_cache_manager.catch_up(plan.requests)
