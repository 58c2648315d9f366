"""Log-probabilities belong to the unmodified logits, and are normalised, sorted and ranked."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.request.sampling import SamplingParams
from services.worker.sampling.logprobs import logprob_rows
from services.worker.sampling.sampler import Sampler


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(0, 5), num_top=st.integers(0, 20))
def test_rows_are_those_of_a_sorted_log_softmax(seed: int, num_rows: int, num_top: int) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((num_rows, 20)) * 4).astype(np.float32)
    targets = generator.integers(0, 20, num_rows)
    found = logprob_rows(logits, targets, num_top)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    assert found.width == 1 + num_top
    assert found.token_ids.shape == found.logprobs.shape == (num_rows, 1 + num_top)
    for row in range(num_rows):
        order = np.argsort(-logits[row], kind="stable")
        assert found.token_ids[row].tolist() == [targets[row], *order[:num_top]]
        assert found.ranks[row] == 1 + order.tolist().index(targets[row])
        values = expected[row][found.token_ids[row]]
        np.testing.assert_allclose(found.logprobs[row], values, atol=1e-5)


def test_all_tokens_together_have_probability_one() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    found = logprob_rows(logits.numpy(), np.array([0, 1, 2]), num_top=50)
    np.testing.assert_allclose(np.exp(found.logprobs[:, 1:]).sum(axis=1), 1, rtol=1e-5)
    assert (np.diff(found.logprobs[:, 1:], axis=1) <= 0).all()


def test_equal_logits_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    found = logprob_rows(logits.numpy(), np.array([2]), num_top=4)
    assert found.token_ids.tolist() == [[2, 1, 2, 3, 0]]
    assert found.ranks.tolist() == [2]


def test_a_prompt_row_does_not_depend_on_the_chunk_it_is_in() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    targets = np.arange(6)
    whole = logprob_rows(logits.numpy(), targets, num_top=3)
    chunks = [logprob_rows(logits[i : i + 2].numpy(), targets[i : i + 2], 3) for i in (0, 2, 4)]
    for name in ("token_ids", "logprobs", "ranks"):
        joined = np.concatenate([getattr(chunk, name) for chunk in chunks])
        np.testing.assert_array_equal(joined, getattr(whole, name))


def test_nan_in_a_prompt_row_stays_in_that_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [float("nan"), 1.0, 2.0]])
    found = logprob_rows(logits.numpy(), np.array([0, 1]), num_top=2)
    assert np.isfinite(found.logprobs[0]).all()
    assert np.isnan(found.logprobs[1]).all()


def test_sampled_log_probabilities_are_those_before_any_parameter() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=1,
        repetition_penalty=3.0,
        logit_bias_token_ids=(0,),
        logit_bias_values=(100.0,),
        logprobs=2,
    )
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]]))
    sampler = Sampler(max_num_seqs=1, vocab_size=3)
    sampler.add(0, params, np.array([0, 2], dtype=np.int32), 1)
    rows = sampler.sample(logits, np.array([0])).logprobs[0]
    assert rows.token_ids.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(np.exp(rows.logprobs), [[0.1, 0.7, 0.2]], rtol=1e-6)
    assert rows.ranks.tolist() == [3]


def test_only_requests_that_want_them_get_log_probabilities() -> None:
    sampler = Sampler(max_num_seqs=3, vocab_size=4)
    for row, wanted in enumerate((None, 0, 3)):
        params = SamplingParams(temperature=0, logprobs=wanted)
        sampler.add(row, params, np.array([1], dtype=np.int32), 1)
    found = sampler.sample(torch.eye(4)[:3], np.array([2, 0, 1])).logprobs
    assert {row: rows.width for row, rows in found.items()} == {0: 4, 2: 1}
    assert all(rows.ranks.tolist() == [1] for rows in found.values())
