"""Sampling a whole batch with torch draws the same tokens as sampling row by row on the host."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.backends.device import CpuDevice
from services.worker.backends.row_sampler import UNUSABLE
from services.worker.sampling.device_logprobs import logprobs_on_device
from services.worker.sampling.device_sampler import sample_on_device
from services.worker.sampling.logprobs import logprob_rows
from services.worker.sampling.sampler import Sampler

VOCAB_SIZE = 60
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.3, top_k=5),
    SamplingParams(temperature=2.5, top_p=0.7),
    SamplingParams(temperature=1, min_p=0.2),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_k=VOCAB_SIZE + 3, top_p=1e-9),
]


def samplers(kinds: list[SamplingParams]) -> tuple[Sampler, Sampler]:
    pair = Sampler(len(kinds), VOCAB_SIZE), Sampler(len(kinds), VOCAB_SIZE)
    for sampler in pair:
        for row, kind in enumerate(kinds):
            params = SamplingParams(
                temperature=kind.temperature,
                top_k=kind.top_k,
                top_p=kind.top_p,
                min_p=kind.min_p,
                seed=1000 + row,
            )
            sampler.add(row, params, np.arange(3), 3)
    return pair


def sample(sampler: Sampler, logits: torch.Tensor, rows: np.ndarray) -> list[int]:
    return sample_on_device(logits, sampler.sampling_metadata(rows), CpuDevice()).tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_many_draws_of_every_kind(ties: bool) -> None:
    host, device = samplers(KINDS)
    rows = np.arange(len(KINDS))
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        logits = torch.randn(len(KINDS), VOCAB_SIZE, generator=generator) * 2
        if ties:
            logits = logits.round()
        assert sample(device, logits, rows) == host.sample(logits, rows).token_ids.tolist()


def test_draws_from_a_large_vocabulary_equal_the_hosts() -> None:
    """A vocabulary of many tokens. In some rows only seven of them are possible."""
    vocab_size, num_rows = 70_000, 130
    host, device = Sampler(num_rows, vocab_size), Sampler(num_rows, vocab_size)
    for sampler in (host, device):
        for row in range(num_rows):
            params = SamplingParams(temperature=0.5 + row / 20, seed=row)
            sampler.add(row, params, np.arange(row + 1), 1)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(9)) * 3
    logits[:5, 7:] = -torch.inf
    rows = np.arange(num_rows)
    assert sample(device, logits, rows) == host.sample(logits, rows).token_ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_sampling_in_all_rows_or_in_some(kind: SamplingParams) -> None:
    host, device = samplers([KINDS[0], kind, kind])
    rows = np.array([2, 0])
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    for _ in range(5):
        assert sample(device, logits, rows) == host.sample(logits, rows).token_ids.tolist()


def test_rows_without_a_usable_distribution_are_reported() -> None:
    _, device = samplers([KINDS[0], KINDS[1], KINDS[3]])
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    assert sample(device, logits, np.arange(3)) == [0, UNUSABLE, UNUSABLE]


def test_edits_need_the_host_and_log_probabilities_do_not() -> None:
    sampler = Sampler(3, VOCAB_SIZE)
    sampler.add(0, SamplingParams(temperature=1, top_k=3), np.arange(3), 3)
    sampler.add(1, SamplingParams(temperature=0, logprobs=4), np.arange(3), 3)
    sampler.add(2, SamplingParams(temperature=0, presence_penalty=1), np.arange(3), 3)
    assert not len(sampler.constrained(np.array([0, 1])))
    assert sampler.constrained(np.array([1, 2, 0])).tolist() == [1]
    assert sampler.num_logprobs(np.array([2, 1, 0])) == {1: 4}


@pytest.mark.parametrize("ties", [False, True])
def test_log_probabilities_are_those_of_the_host(ties: bool) -> None:
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(7)) * 3
    if ties:
        logits = logits.round()
    logits[0, 11] = -torch.inf
    token_ids = torch.tensor([11, 0, 59, 30, int(logits[4].argmax())])
    for num_top in ({0: 3, 2: 0, 4: VOCAB_SIZE}, {1: 0}, dict.fromkeys(range(5), 7)):
        found = logprobs_on_device(logits, token_ids, num_top, CpuDevice()).wait()
        assert list(found) == list(num_top)
        for row, count in num_top.items():
            expected = logprob_rows(
                logits[row : row + 1].numpy(), token_ids[row : row + 1].numpy(), count
            )
            assert found[row].width == expected.width
            assert found[row].token_ids.tolist() == expected.token_ids.tolist()
            assert found[row].ranks.tolist() == expected.ranks.tolist()
            np.testing.assert_allclose(found[row].logprobs, expected.logprobs, atol=1e-5)


def test_a_value_that_the_device_does_not_read_is_refused() -> None:
    _, device = samplers(KINDS)
    metadata = device.sampling_metadata(np.arange(len(KINDS)))
    more = np.vstack((metadata.parameters, np.zeros(len(KINDS))))
    with pytest.raises(ValueError, match="unpack"):
        sample_on_device(
            torch.zeros(len(KINDS), VOCAB_SIZE), replace(metadata, parameters=more), CpuDevice()
        )
