"""Compares the routing policies on conversations, in simulated time."""

import pytest

from benchmarks.routing.conversations import Workload
from tests.gateway.simulated_fleet import BLOCK_SIZE, SimulatedFigures, SimulatedFleet

CONVERSATIONS = Workload(
    num_conversations=96,
    num_turns=15,
    num_system_prompts=8,
    system_tokens=48,
    user_tokens=48,
    answer_tokens=16,
    num_warm_up=300,
    num_requests=400,
    vocab_size=4096,
    seed="simulated",
)
NUM_REPLICAS, NO_CAP = 4, 10**6


def serve(policy: str, workload: Workload, at_once: int, pool_share: float) -> SimulatedFigures:
    num_blocks = round(pool_share * workload.num_blocks(BLOCK_SIZE))
    return SimulatedFleet(policy, NUM_REPLICAS, num_blocks).run(workload, at_once)


@pytest.mark.parametrize("at_once", [4, 24])
def test_conversations_stay_where_they_are_cached_at_any_load(at_once: int) -> None:
    """The pools of all replicas together have exactly enough blocks for all conversations."""
    aware, turns, load = (
        serve(policy, CONVERSATIONS, at_once, 1 / NUM_REPLICAS)
        for policy in ("cache-aware", "round-robin", "least-loaded")
    )
    assert aware.hit_rate > 3 * turns.hit_rate
    assert aware.hit_rate >= 0.93 * aware.best_hit_rate
    assert aware.ttft_p99 <= 1.05 * load.ttft_p99
    assert aware.spread < 1.3


def test_replicas_that_measure_unequal_speeds_share_the_conversations() -> None:
    """With little load, measured speeds differ by chance. Here one of several equal replicas seems
    to have half the speed of another.
    """
    num_blocks = round(CONVERSATIONS.num_blocks(BLOCK_SIZE) / NUM_REPLICAS)
    world = SimulatedFleet(
        "cache-aware", NUM_REPLICAS, num_blocks, measured_slowness=(1.0, 1.0, 1.6, 0.8)
    )
    aware = world.run(CONVERSATIONS, 4)
    assert aware.hit_rate > 3 * serve("round-robin", CONVERSATIONS, 4, 0.25).hit_rate
    assert aware.spread < 1.3


def test_a_prefix_that_all_share_does_not_make_a_queue_at_one_replica() -> None:
    """Prompts are a long system prompt and a short question. Loads may differ without limit."""
    questions = Workload(64, 1, 1, 512, 16, 16, 100, 300, 4096, "questions")
    aware, load = (
        SimulatedFleet(policy, NUM_REPLICAS, 2000, NO_CAP).run(questions, 48)
        for policy in ("cache-aware", "least-loaded")
    )
    assert aware.ttft_p99 <= 2 * load.ttft_p99
    assert aware.spread < 1.2
