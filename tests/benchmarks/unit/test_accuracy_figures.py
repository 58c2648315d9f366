"""Tests the conversations, and the fit of the services' costs, of the benchmark that compares
simulations with real runs.
"""

import json

import pytest

from benchmarks.accuracy.conversations import Conversations, RealContext, at_once, with_priorities
from benchmarks.accuracy.real import Answered
from benchmarks.accuracy.serving import decodings, fit_serving, median_error, total_error
from services.worker.core.step_times import NO_SERVING, ServingCosts, StepCosts, StepTimes

CONVERSATIONS = Conversations(max_model_len=1024).arriving(200, 5.0, seed=1)
TIMES = StepTimes(StepCosts(seconds=0.002), StepCosts(seconds=0.003, seconds_per_token=1e-4))
CURVE = (1, 7e-4), (2, 8e-4), (3, 1.2e-3)
SERVING = ServingCosts(seconds_by_requests=CURVE, seconds_per_new_request=1e-3)


def test_conversations_fit_the_model_and_have_turns() -> None:
    lengths = [
        program.num_shared_tokens
        + sum(turn.num_new_tokens + turn.num_output_tokens for turn in program.turns)
        for program in CONVERSATIONS
    ]
    assert 400 < max(lengths) <= 1024
    assert max(len(program.turns) for program in CONVERSATIONS) > 2


def test_conversations_at_once_have_the_same_tokens_and_no_pause() -> None:
    for before, after in zip(CONVERSATIONS, at_once(CONVERSATIONS), strict=True):
        assert after.arrival_seconds == 0
        for one, other in zip(before.turns, after.turns, strict=True):
            assert (one.num_new_tokens, other.pause_seconds) == (other.num_new_tokens, 0)


def test_short_conversations_have_the_higher_priority() -> None:
    ranked = sorted(with_priorities(CONVERSATIONS), key=lambda program: program.priority)
    assert len(ranked[0].turns) < len(ranked[-1].turns)
    assert ranked[0].priority > 0


def test_a_prompt_continues_the_conversation_with_the_real_answer() -> None:
    first, second = [program for program in CONVERSATIONS if len(program.turns) > 1][:2]
    context = RealContext(first, vocab_size=300)
    prompt = context.prompt(first.turns[0])
    assert len(prompt) == first.num_shared_tokens + first.turns[0].num_new_tokens
    assert max(prompt) < 300
    answer = [7] * first.turns[0].num_output_tokens
    context.token_ids += answer
    later = context.prompt(first.turns[1])
    assert later[: len(prompt) + len(answer)] == prompt + answer
    assert len(later) == len(prompt) + len(answer) + first.turns[1].num_new_tokens
    other = RealContext(second, vocab_size=300).prompt(second.turns[0])
    is_shared = first.application == second.application
    assert (other[:64] == prompt[:64]) is is_shared
    assert other[64:96] != prompt[64:96]


def logged(step: int, counts: dict[int, int], new: list[int]) -> list[str]:
    """The entries of a step log for one step in which each request gets a token."""
    entries = [
        {
            "call": "schedule",
            "step": step,
            "keys": list(counts),
            "num_scheduled_tokens": list(counts.values()),
            "num_computed_tokens": [10] * len(counts),
            "new": new,
        },
        {"call": "update_from_output", "step": step, "token_ids": [[5]] * len(counts)},
    ]
    return list(map(json.dumps, entries))


def test_the_costs_of_serving_are_found() -> None:
    """Request 1 decodes in steps 1 to 7, requests 2 to 4 in steps 2 to 4, 4 to 6 and 5 to 9."""
    running = {0: [1], 1: [1], 2: [1, 2], 3: [1, 2], 4: [1, 2, 3], 5: [1, 3, 4], 6: [1, 3, 4]}
    running |= {7: [1, 4], 8: [4], 9: [4]}
    begins, ends = {1: 0, 2: 2, 3: 4, 4: 5}, {1: 7, 2: 4, 3: 6, 4: 9}
    lines = [json.dumps({"schema": "the header"})]
    lines += [json.dumps({"call": "add", "key": key, "tokens": [key]}) for key in begins]
    seconds = []
    for step, keys in running.items():
        new = [key for key in keys if begins[key] == step]
        lines += logged(step, {key: 20 if key in new else 1 for key in keys}, new)
        device = 0.002 if not new else 0.003 + 1e-4 * (20 * len(new) + len(keys) - len(new))
        seconds.append(device + dict(CURVE)[len(keys)] + 1e-3 * len(new))
    answered = [
        Answered((key,), [], 0, 0.0, sum(seconds[: begins[key] + 1]), sum(seconds[: ends[key] + 1]))
        for key in begins
    ]
    found = decodings(lines, answered, TIMES)
    assert [one.num_steps.tolist() for one in found] == [
        [0, 1, 3, 3],
        [0, 0, 1, 1],
        [0, 0, 0, 2],
        [0, 2, 1, 1],
    ]
    assert median_error(found, SERVING) == pytest.approx(0)
    assert total_error(found, SERVING) == pytest.approx(0)
    assert median_error(found, NO_SERVING) > 0.1
    assert total_error(found, NO_SERVING) < -0.1
    fitted = fit_serving(found)
    assert dict(fitted.seconds_by_requests) == pytest.approx(dict(CURVE))
    assert fitted.seconds_per_new_request == pytest.approx(SERVING.seconds_per_new_request)
