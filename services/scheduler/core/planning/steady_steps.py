"""Steps in which every running request computes one token, and nothing else happens.

A simulation can skip such steps: it knows their output without planning each of them.
"""

from collections.abc import Sequence

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler


def num_steady_steps(scheduler: Scheduler, plan: SchedulerOutput) -> int:
    """The number of steps after `plan` that differ from it only in the counts of computed tokens,
    if no request arrives and none is aborted. `plan` is the last planned step, and the only one in
    flight. 0 if `plan` itself does more than compute a token of each running request, and blocks
    for it.
    """
    running, num_requests = scheduler.running, len(plan.requests)
    is_steady = (
        plan.num_tokens == num_requests == len(running)
        and plan.wait_reason is None
        and not (plan.new or plan.resumed or plan.is_special)
        and scheduler.is_steady
    )
    return running.num_steady_steps if is_steady else 0


def skip_steps(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    num_steps: int,
    token_ids: Sequence[Sequence[int]],
) -> None:
    """Changes the scheduler and `plan` as if `num_steps` further steps had been planned and their
    outputs applied. `token_ids` are the outputs: `num_steps` tokens for each request of the plan.
    No token may end a request.
    """
    for request, tokens in zip(plan.requests, token_ids, strict=True):
        request.token_ids += tokens
    plan.appended_blocks = {}
    plan.step += num_steps
    plan.num_computed_tokens = [count + num_steps for count in plan.num_computed_tokens]
    scheduler.running.advance(num_steps)
    scheduler.steps.skip(num_steps)
