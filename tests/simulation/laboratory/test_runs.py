"""Whole runs of the simulator. The expected numbers are computed by hand or by queueing theory."""

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest

from services.simulation.laboratory.programs import Program, Turn
from services.simulation.laboratory.run import RunResult, Setup, simulate
from services.simulation.laboratory.tier import TierSize
from services.simulation.laboratory.workloads import Traffic, generate
from services.worker.core.step_times import ServingCosts, StepCosts, StepTimes
from tests.simulation.laboratory.small import program, setup


def test_a_program_of_two_turns_takes_its_steps_and_its_pause() -> None:
    run = simulate(setup(), [program(1, 5.0, (100, 3, 0.0), (20, 2, 10.0))])
    # Turn 1: steps of 64 and 36 prompt tokens, then two of one token: 7.4 + 4.6 + 1 + 1 = 14 s.
    # Turn 2: 96 of 123 prompt tokens are cached, as 102 were computed. A step of 27 tokens and one
    # of 1 token: 3.7 + 1 = 4.7 s.
    accounts = run.accounts
    assert accounts.job_seconds.tolist() == pytest.approx([14.0 + 10.0 + 4.7])
    assert accounts.first_turn_seconds.tolist() == pytest.approx([12.0])
    assert accounts.later_turn_seconds.tolist() == pytest.approx([3.7])
    assert accounts.num_cached_tokens == 96
    assert accounts.num_reusable_tokens == 96
    assert accounts.num_prompt_tokens == 223
    assert run.num_computed_tokens == 102 + 27 + 1
    assert run.num_steps == 6


def test_serving_costs_make_steps_and_new_requests_longer() -> None:
    serving = ServingCosts(seconds_by_requests=((1, 0.75), (2, 9.0)), seconds_per_new_request=2.0)
    costly = replace(setup(), serving=serving)
    for is_skipping in True, False:
        run = simulate(replace(costly, may_skip=is_skipping), [program(1, 0.0, (60, 9, 0.0))])
        assert run.accounts.job_seconds.tolist() == pytest.approx([7.0 + 8 + 9 * 0.75 + 2])
        assert run.accounts.alone_seconds.tolist() == pytest.approx([7.0 + 8 + 9 * 0.75 + 2])


def test_a_programs_time_alone_is_its_time_on_an_idle_replica() -> None:
    run = simulate(setup(), [program(1, 0.0, (100, 30, 0.0), (20, 40, 10.0))])
    # A hit consists of whole blocks, here 128 of the 129 computed tokens. So one token is computed
    # again, which takes 0.1 s.
    (taken,), (alone,) = run.accounts.job_seconds, run.accounts.alone_seconds
    assert taken - alone == pytest.approx(0.1)


def test_two_programs_of_an_application_compute_its_prefix_once() -> None:
    of = {"application": 3, "num_shared_tokens": 48}
    run = simulate(
        setup(), [program(1, 0.0, (16, 1, 0.0), **of), program(2, 50.0, (16, 1, 0.0), **of)]
    )
    assert run.num_computed_tokens == 64 + 16
    assert run.accounts.num_cached_tokens == run.accounts.num_reusable_tokens == 48


def test_the_directory_finds_a_prefix_that_one_of_many_replicas_has_cached() -> None:
    of = {"num_shared_tokens": 4_800}
    many = replace(setup(), num_replicas=16)
    run = simulate(many, [program(n, 1e3 * n, (16, 1, 0.0), **of) for n in (1, 2, 3)])
    assert run.accounts.num_cached_tokens == 2 * 4_800


def test_the_next_turn_waits_for_all_subagents() -> None:
    children = tuple(program(number, 0.0, (10, 1, 0.0)) for number in (2, 3))
    parent = Program(1, 0.0, (Turn(10, 1, subagents=children), Turn(10, 1, 5.0)))
    run = simulate(setup(), [parent])
    # 2 s for 10 tokens, 3 s for both subagents in one step, 5 s of pause, 3.1 s for 21 new tokens.
    assert run.accounts.job_seconds.tolist() == pytest.approx([2.0 + 3.0 + 5.0 + 3.1])
    assert len(run.accounts.wait_seconds) == 4


def test_a_compacted_context_is_computed_again_behind_the_shared_prefix() -> None:
    turns = (Turn(80, 1), Turn(8, 1, num_kept_tokens=40))
    run = simulate(setup(), [Program(1, 0.0, turns, num_shared_tokens=32)])
    # Of the second prompt's 48 tokens, only the 32 that the prompts share are found in the cache.
    assert run.accounts.num_cached_tokens == 32
    assert run.accounts.num_evicted_tokens == 0


def test_waste_counts_what_was_evicted() -> None:
    # The pool has 15 blocks. The first program fills 12 blocks (192 tokens). The second one needs
    # 14 blocks, which evict blocks of the first.
    first = program(1, 0.0, (200, 1, 0.0), (8, 1, 100.0))
    run = simulate(setup(num_blocks=16), [first, program(2, 30.0, (220, 1, 0.0))])
    assert run.accounts.num_cached_tokens < 192
    assert run.accounts.num_evicted_tokens == 192 - run.accounts.num_cached_tokens


def test_an_evicted_context_is_loaded_from_the_tier() -> None:
    # The pool has 15 blocks. The first program fills 12 blocks. The second program needs 14 blocks,
    # and evicts 11 of them.
    first = program(1, 0.0, (200, 1, 0.0), (8, 1, 100.0))
    with_tier = replace(setup(num_blocks=16), tier=TierSize(40, seconds_per_block=0.5))
    run = simulate(with_tier, [first, program(2, 30.0, (220, 1, 0.0))])
    # 11 blocks are loaded in 5.5 s, and then 17 of 209 tokens are computed in 2.7 s.
    assert run.accounts.later_turn_seconds.tolist() == pytest.approx([5.5 + 2.7])
    assert run.accounts.num_cached_tokens == 192
    assert run.accounts.num_evicted_tokens == 0


def test_loads_use_one_link_one_after_another_while_steps_run() -> None:
    evicted = [program(number, 0.0, (96, 1, 0.0), (8, 1, 100.0)) for number in (1, 2)]
    others = [program(3, 50.0, (220, 1, 0.0)), program(4, 108.0, (8, 30, 0.0))]
    with_tier = replace(setup(num_blocks=17), tier=TierSize(40, seconds_per_block=2.0))
    run = simulate(with_tier, [*evicted, *others])
    # Each program loads 6 blocks in 12 s. The second one arrives 7.4 s after the first, and waits
    # 4.6 s until the first has loaded.
    assert run.accounts.later_turn_seconds.tolist() == pytest.approx([12 + 3.0, 4.6 + 12 + 2.9])
    assert run.accounts.num_evicted_tokens == 0


def test_waste_counts_what_was_preempted() -> None:
    # Two requests grow to 6 blocks each, but the pool has only 11 blocks.
    run = simulate(
        setup(num_blocks=12, scheduler_reserve_full_isl=False),
        [program(1, 0.0, (60, 30, 0.0)), program(2, 0.0, (60, 30, 0.0))],
    )
    assert run.num_preemptions == 1
    lost = run.accounts.num_preempted_tokens
    assert lost > 0
    assert run.num_computed_tokens == 2 * 89 + lost


def md1(rate: float, num_programs: int, seed: int) -> Iterator[Program]:
    rng, now = random.Random(seed), 0.0
    for number in range(1, num_programs + 1):
        now += rng.expovariate(rate)
        yield program(number, now, (16, 4, 0.0))


def test_a_queue_with_one_place_waits_as_pollaczek_and_khinchine_say() -> None:
    # The service time s is 5.6 s: 2.6 s for the prompt and 3 steps of 1 s. The mean wait of an
    # M/D/1 queue is rho s / (2 (1 - rho)).
    rate, service = 0.6 / 5.6, 5.6
    run = simulate(setup(max_num_seqs=1), md1(rate, 5_000, seed=3))
    assert run.accounts.alone_seconds[0] == pytest.approx(service)
    rho = rate * service
    assert fmean(run.accounts.wait_seconds) == pytest.approx(
        rho * service / (2 * (1 - rho)), rel=0.06
    )


def everything(run: RunResult) -> list[object]:
    accounts = run.accounts
    return [
        accounts.job_seconds,
        accounts.first_turn_seconds,
        accounts.later_turn_seconds,
        accounts.wait_seconds,
        accounts.num_cached_tokens,
        accounts.num_evicted_tokens,
        accounts.num_preempted_tokens,
        accounts.num_cold_tokens,
        run.num_steps,
        run.num_preemptions,
        run.num_computed_tokens,
        run.simulated_seconds,
    ]


TIMES = StepTimes(
    StepCosts(seconds=7e-3, seconds_per_decoded_context=5.2e-7, seconds_per_request=2e-4),
    StepCosts(seconds=7e-3, seconds_per_token=4e-5, seconds_per_new_context=1.3e-8),
)


def crowded(workload: str, num_replicas: int = 1, *, is_async: bool = True) -> Setup:
    crowd = setup(
        num_blocks=301,
        times=TIMES,
        async_scheduling=is_async,
        max_num_batched_tokens=512,
        scheduler_reserve_full_isl=workload == "alternating",
    )
    return replace(crowd, num_replicas=num_replicas)


@pytest.mark.parametrize("is_optimum", [False, True])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("workload", ["automated", "chat"])
def test_skipped_steps_change_nothing(workload: str, *, is_async: bool, is_optimum: bool) -> None:
    scale = 1.0 if workload == "chat" else 0.01
    traffic = Traffic(25, 2.0, seed=5, scale=scale, max_tokens=2_000)
    simulated = replace(crowded(workload, 2, is_async=is_async), is_optimum=is_optimum)
    skipped = simulate(simulated, generate(workload, traffic))
    stepped = simulate(replace(simulated, may_skip=False), generate(workload, traffic))
    assert everything(skipped) == everything(stepped)
    assert skipped.num_planned_steps < stepped.num_planned_steps


def test_all_steps_between_the_first_and_the_last_tokens_are_skipped() -> None:
    run = simulate(setup(), [program(1, 0.0, (10, 400, 0.0))])
    # The four planned steps are the prompt, the next token, the last token, and the end.
    assert (run.num_steps, run.num_planned_steps) == (400, 4)


@pytest.mark.parametrize("workload", ["automated", "interactive", "alternating", "chat"])
def test_eviction_with_known_future_has_no_fewer_hits(workload: str) -> None:
    num_better = 0
    for seed in range(4):
        scale = 1.0 if workload == "chat" else 0.01
        traffic = Traffic(12, 1.0, seed=seed, scale=scale, max_tokens=2_000)
        simulated = crowded(workload)
        lru = simulate(simulated, generate(workload, traffic)).accounts
        best = simulate(replace(simulated, is_optimum=True), generate(workload, traffic)).accounts
        assert best.num_cached_tokens >= lru.num_cached_tokens
        num_better += best.num_cached_tokens > lru.num_cached_tokens
    assert num_better
