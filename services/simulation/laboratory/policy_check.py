"""The conformance kit of scheduling policies: the rules that every policy must obey.

1. A queue contains each queued request once, and iterating over it changes nothing.
2. A victim is a running request.
3. In small crowded simulations with random limits, every step stays within its limits, every
   request ends, no block is left in use, and the same seed gives the same run.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.core import step_costs
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies import find_policy
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue, SchedulingPolicy
from services.scheduler.core.request import Request
from services.simulation.laboratory.programs import Program, Turn
from services.simulation.laboratory.replica import SimulatedReplica
from services.simulation.laboratory.run import RunResult, Setup, simulate
from services.worker.core.step_times import StepCosts, StepTimes

_TIMES = StepTimes(StepCosts(seconds=1.0), StepCosts(seconds=1.0, seconds_per_token=0.01))
_CONFIG = SchedulerConfig(4, 64, max_model_len=400, block_size=4, num_blocks=60)
_MAX_STEPS_PER_TOKEN = 20
"""A simulation fails if it takes more steps than this per token of its requests."""


class PolicyProblem(Exception):
    """A violation of a rule by a policy, described in one sentence."""


def check_policy(name: str, num_worlds: int, seed: int) -> None:
    """Checks a policy in `num_worlds` random simulations. Raises PolicyProblem if it breaks a rule,
    and InvalidArgument if no policy has this name.
    """
    kind = find_policy(name)
    for number in range(num_worlds):
        world = f"{seed} {number}"
        try:
            policy = kind(PolicyParts(_CONFIG, lambda: 0.0, step_costs.StepCosts()))
            _check_queue(policy, random.Random(f"queue {world}"))
            _check_victim(policy, random.Random(f"victim {world}"))
            if _live(name, policy, world) != _live(name, policy, world):
                raise PolicyProblem(
                    "two runs of the same simulation have different outcomes: the policy must be "
                    "deterministic"
                )
        except PolicyProblem as problem:
            raise PolicyProblem(f"world {number} of seed {seed}: {problem}") from None
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise PolicyProblem(f"world {number} of seed {seed}: {why}") from error


def _requests(rng: random.Random, count: int, *, uses_priority: bool) -> list[Request]:
    return [
        Request(
            f"request-{number}",
            RequestKey(number),
            list(range(num_tokens := rng.randint(1, 40))),
            num_tokens,
            SamplingParams(max_tokens=rng.randint(1, 9)),
            priority=rng.randint(-2, 2) if uses_priority else 0,
            arrival_time=float(number // 2),
        )
        for number in range(count)
    ]


def _check_queue(policy: SchedulingPolicy, rng: random.Random) -> None:
    queue, queued = policy.create_request_queue(), set[Request]()
    for request in _requests(rng, 30, uses_priority=policy.uses_priority):
        (queue.prepend if rng.random() < 0.3 else queue.add)(request)
        queued.add(request)
        if rng.random() < 0.4:
            removed = rng.choice(sorted(queued, key=lambda one: one.key))
            queue.remove(removed)
            queued.remove(removed)
        if rng.random() < 0.2:
            queue.reorder()
            queue.put_in_order()
        _require_each_once(queue, queued)
    try:
        queue.remove(_requests(rng, 1, uses_priority=False)[0])
    except ValueError:
        return
    raise PolicyProblem("remove must raise ValueError for a request that is not queued")


def _require_each_once(queue: RequestQueue, queued: set[Request]) -> None:
    order = list(queue)
    if len(order) != len(queue) or len(order) != len(queued) or set(order) != queued:
        raise PolicyProblem(
            f"iterating over a queue of {len(queued)} requests yields {len(order)}, or other "
            "requests"
        )
    if list(queue) != order:
        raise PolicyProblem("iterating over the queue changes its order")


def _check_victim(policy: SchedulingPolicy, rng: random.Random) -> None:
    running = RunningRequests()
    for request in _requests(rng, rng.randint(1, 9), uses_priority=policy.uses_priority):
        running.append(request)
    victim = policy.victim(running)
    if victim not in list(running):
        raise PolicyProblem("victim returned a request that does not run")
    if policy.victim(running) is not victim:
        raise PolicyProblem("victim returned different requests for the same running requests")


def _live(name: str, policy: SchedulingPolicy, world: str) -> list[object]:
    rng = random.Random(f"world {world}")
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        max_model_len=400,
        block_size=4,
        num_blocks=rng.randint(30, 60),
        policy=name,
        async_scheduling=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.8,
        scheduler_reserve_full_isl=rng.random() < 0.5,
    )
    programs = list(_programs(rng, uses_priority=policy.uses_priority))
    num_tokens = sum(t.num_new_tokens + t.num_output_tokens for p in programs for t in p.turns)
    limit = _MAX_STEPS_PER_TOKEN * num_tokens

    def watch(replica: SimulatedReplica, plan: SchedulerOutput) -> None:
        _require_within_limits(replica, plan)
        if replica.num_planned_steps > limit:
            raise PolicyProblem(f"the policy needs more than {limit} steps for {num_tokens} tokens")

    setup = Setup(config, _TIMES, watch=watch)
    run = simulate(replace(setup, may_skip=False), programs)
    skipped = simulate(setup, programs)
    if _outcome(run) != _outcome(skipped):
        raise PolicyProblem(
            "the outcome changes if the simulation skips steps in which nothing is decided"
        )
    return _outcome(run)


def _programs(rng: random.Random, *, uses_priority: bool) -> Iterator[Program]:
    now = 0.0
    for number in range(1, 13):
        now += rng.expovariate(0.3)
        turns = tuple(
            Turn(rng.randint(1, 12), rng.randint(1, 14), rng.choice((0.0, rng.uniform(0, 6))))
            for _ in range(rng.randint(1, 3))
        )
        priority = rng.randint(-2, 2) if uses_priority else 0
        yield Program(number, now, turns, num_shared_tokens=8, priority=priority)


def _require_within_limits(replica: SimulatedReplica, plan: SchedulerOutput) -> None:
    config = replica.scheduler.config
    if sum(plan.num_scheduled_tokens) > config.token_budget:
        raise PolicyProblem(f"step {plan.step} has more tokens than its token budget")
    if len(set(plan.requests)) != len(plan.requests):
        raise PolicyProblem(f"step {plan.step} has a request twice")
    if len(replica.scheduler.running) > config.max_running:
        raise PolicyProblem(f"more than {config.max_running} requests run")
    replica.pool.core.check()


def _outcome(run: RunResult) -> list[object]:
    accounts = run.accounts
    times = (accounts.job_seconds, accounts.first_turn_seconds, accounts.wait_seconds)
    counts = (run.num_steps, run.num_preemptions, run.num_computed_tokens)
    return [*(list(values) for values in times), *counts]
