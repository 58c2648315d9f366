"""The output of `stepwell status` for the gateway's statistics."""

from typing import Any

import pytest

from services.cli.status import plain_text
from services.cli.views.samples import Sample

STATS: dict[str, Any] = {
    "incarnation": "1234",
    "state": "ENGINE_STATE_RUNNING",
    "state_reason": "",
    "num_running": 3,
    "num_waiting": 2,
    "wait_reason": "WAIT_REASON_NO_BLOCKS",
    "max_num_seqs": 64,
    "num_usable_blocks": 200,
    "num_free_blocks": 150,
    "block_size": 16,
    "num_steps": 40,
    "num_prompt_tokens": 1000,
    "num_cached_tokens": 250,
    "num_generated_tokens": 500,
    "num_preemptions": 7,
    "num_lost_tokens": 300,
    "num_finished": 1,
    "mean_step_nanos": 2_500_000,
}


def sample(seconds: float, stats: dict[str, Any] | None, reason: str = "") -> Sample:
    replica = {"address": "a:1", "ready": not reason, "reason": reason, "stats": stats}
    status = {"model": "m", "draining": False, "requests_in_flight": 5, "replicas": [replica]}
    return Sample(status, seconds)


def test_a_replica_in_numbers() -> None:
    assert plain_text(sample(0, STATS), None).splitlines() == [
        "m: 5 requests here",
        "replica a:1: running",
        "  running      3 of 64",
        "  waiting      2 for blocks",
        "  blocks       50 of 200 (25.0 %) used, 16 tokens each",
        "  prefix hits  250 of 1000 (25.0 %) prompt tokens",
        "  generated    500 tokens",
        "  preemptions  7, 300 tokens given up",
        "  steps        40, 2.5 ms each",
        "  finished     1 request",
    ]


def test_two_samples_give_a_rate() -> None:
    later = {**STATS, "num_generated_tokens": 600}
    assert "generated    600 tokens, 50.0 per second" in plain_text(
        sample(12, later), sample(10, STATS)
    )


def test_a_new_scheduler_counts_from_zero() -> None:
    later = {**STATS, "num_generated_tokens": 20, "incarnation": "5678"}
    assert "generated    20 tokens\n" in plain_text(sample(12, later), sample(10, STATS))


def test_a_replica_that_is_away_says_why() -> None:
    assert plain_text(sample(0, None, "UNAVAILABLE: gone"), None).splitlines()[1:] == [
        "replica a:1: UNAVAILABLE: gone"
    ]


def test_an_empty_replica_has_no_shares() -> None:
    empty = {**STATS, "num_prompt_tokens": 0, "num_cached_tokens": 0}
    assert "prefix hits  0 of 0 prompt tokens" in plain_text(sample(0, empty), None)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"state": "ENGINE_STATE_PAUSED", "paused": True}, "paused"),
        ({"paused": True}, "running, pausing"),
        ({"drained": True}, "running, drained"),
    ],
)
def test_a_replica_that_is_paused_has_one_word(changes: dict[str, Any], word: str) -> None:
    assert plain_text(sample(0, STATS | changes), None).splitlines()[1] == f"replica a:1: {word}"
