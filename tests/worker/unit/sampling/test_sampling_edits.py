"""Each change of the logits by a request's parameters, before the sampling filters."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from services.common.request.sampling import SamplingParams
from services.worker.sampling.edits import BadWords, logit_edits
from services.worker.sampling.sampler import Sampler

VOCAB_SIZE = 6
BAN = -np.inf


def edited(
    params: SamplingParams, logits: list[float], prompt: list[int], output: list[int]
) -> list[float]:
    """The logits of a row after all changes, for a request with this prompt and output."""
    token_ids = np.array(prompt + output, dtype=np.int32)
    line = np.array(logits, dtype=np.float32)
    for edit in logit_edits(params, token_ids, len(prompt)):
        edit.apply(line)
    return [float(value) for value in line]


def greedy_tokens(params: SamplingParams, rows: list[list[float]], prompt: list[int]) -> list[int]:
    """The greedy tokens of a request. Row i of `rows` has the logits of step i."""
    sampler = Sampler(max_num_seqs=1, vocab_size=len(rows[0]))
    sampler.add(0, params, np.array(prompt, dtype=np.int32), len(prompt))
    batch_rows = np.zeros(1, dtype=np.int32)
    outputs = [sampler.sample(torch.tensor([row]), batch_rows) for row in rows]
    return [int(output.token_ids[0]) for output in outputs]


def test_only_allowed_tokens_keep_their_logits() -> None:
    params = SamplingParams(allowed_token_ids=(2, 4))
    assert edited(params, [9, 8, 7, 6, 5, 4], [0], []) == [BAN, BAN, 7, BAN, 5, BAN]


def test_a_bad_word_of_one_token_is_never_sampled() -> None:
    params = SamplingParams(temperature=0, bad_words=((5,),))
    assert greedy_tokens(params, [[0, 1, 2, 3, 4, 5]] * 3, [5]) == [4, 4, 4]


def test_a_longer_bad_word_is_stopped_at_its_last_token() -> None:
    params = SamplingParams(temperature=0, bad_words=((1, 2, 3),))
    only = {token: [9.0 * (token == other) for other in range(VOCAB_SIZE)] for token in range(6)}
    rows = [only[1], only[2], only[3], only[3], only[2], only[3]]
    assert greedy_tokens(params, rows, [0]) == [1, 2, 0, 3, 2, 3]


def test_a_bad_word_that_begins_in_the_prompt_may_be_completed() -> None:
    params = SamplingParams(bad_words=((1, 2),))
    assert edited(params, [0, 0, 0], [1], []) == [0, 0, 0]
    assert edited(params, [0, 0, 0], [1], [1]) == [0, 0, BAN]


def test_bad_words_that_overlap_ban_together() -> None:
    params = SamplingParams(bad_words=((1, 2), (2, 1, 3), (0,), (3, 1, 4)))
    assert edited(params, [0] * 6, [], [2, 1]) == [BAN, 0, BAN, BAN, 0, 0]


def test_many_bad_words_take_little_longer_than_one() -> None:
    """All requests of a step wait for the edits of each of them."""

    def seconds(count: int) -> float:
        words = (*((token,) for token in range(count)), *((token, 1) for token in range(count)))
        logits = np.zeros(2048, np.float32)
        edit = BadWords(words, np.array([7], np.int32))
        began = time.thread_time()
        for _ in range(200):
            edit.apply(logits)
        return time.thread_time() - began

    assert min(seconds(1024) for _ in range(5)) < 30 * min(seconds(8) for _ in range(5))


def test_no_ending_token_before_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, eos_token_ids=(5,), stop_token_ids=(4,))
    assert greedy_tokens(params, [[0, 1, 2, 3, 4, 5]] * 4, [1]) == [3, 3, 5, 5]


def test_min_tokens_counts_the_output_a_request_came_back_with() -> None:
    params = SamplingParams(min_tokens=2, eos_token_ids=(1,))
    assert edited(params, [0, 1], [0, 0, 0], [0]) == [0, BAN]
    assert edited(params, [0, 1], [0, 0, 0], [0, 0]) == [0, 1]


def test_a_bias_shifts_logits_but_lifts_no_ban() -> None:
    params = SamplingParams(
        allowed_token_ids=(0, 1), logit_bias_token_ids=(1, 2), logit_bias_values=(-3.0, 100.0)
    )
    assert edited(params, [1, 2, 3], [0], []) == [1, -1, BAN]


def test_penalties_apply_to_the_biased_logit() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias_token_ids=(0,), logit_bias_values=(6.0,)
    )
    assert edited(params, [-2, -2], [0, 1], []) == [2, -4]


def test_frequency_counts_occurrences_and_presence_only_their_fact() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    assert edited(params, [4, 4, 4, 4], [3, 3], [1, 2, 1]) == [4, 2, 2.5, 4]


def test_repetition_comes_before_the_other_penalties() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    assert edited(params, [4, 4, 4], [0], [1]) == [2, 1, 4]


def test_sampled_tokens_are_penalised_from_the_next_step() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    assert greedy_tokens(params, [[5.5, 4, 2, 0]] * 5, [0]) == [0, 1, 0, 1, 2]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    penalty=st.floats(0.125, 5.0, width=32),
    num_prompt=st.integers(0, 30),
    num_output=st.integers(1, 60),
)
def test_repetition_penalty_is_that_of_transformers(
    seed: int, penalty: float, num_prompt: int, num_output: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(100).astype(np.float32)
    token_ids = generator.integers(0, 100, num_prompt + num_output).astype(np.int32)
    params = SamplingParams(repetition_penalty=penalty)
    line = logits.copy()
    edits = logit_edits(params, token_ids[:num_prompt], num_prompt)
    for edit in edits:
        for token_id in token_ids[num_prompt:].tolist():
            edit.append(token_id)
        edit.apply(line)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.from_numpy(token_ids[None].astype(np.int64)), torch.from_numpy(logits[None].copy())
    )
    if penalty == 1.0:
        assert edits == ()
    np.testing.assert_allclose(line, expected[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, min_tokens=3)])
def test_parameters_that_change_nothing_make_no_edits(params: SamplingParams) -> None:
    assert logit_edits(params, np.zeros(3, dtype=np.int32), 2) == ()
