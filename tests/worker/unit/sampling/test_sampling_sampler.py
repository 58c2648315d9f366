"""The sampler, compared with a slow reference. Other rows and preemptions change no token."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.common.request.sampling import SamplingParams
from services.worker.sampling.sampler import Sampler
from tests.worker.race_reference import exponential_of

VOCAB_SIZE = 40


def with_bias(params: SamplingParams) -> SamplingParams:
    return replace(params, logit_bias_values=(2.0, -1.0)[: len(params.logit_bias_token_ids)])


token = st.integers(0, VOCAB_SIZE - 1)
penalty = st.sampled_from([0.0, 0.0, -0.5, 1.5])
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.75, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    logit_bias_token_ids=st.sampled_from([(), (3, 7)]),
    allowed_token_ids=st.one_of(
        st.just(()), st.lists(token, min_size=5, max_size=20, unique=True).map(tuple)
    ),
    bad_words=st.lists(
        st.lists(token, min_size=1, max_size=3).map(tuple), max_size=2, unique=True
    ).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (1, 2)]),
    eos_token_ids=st.sampled_from([(), (0,)]),
).map(with_bias)


def model(token_ids: list[int]) -> np.ndarray:
    """Logits as a function of the whole sequence, in multiples of a quarter, so that ties occur."""
    generator = np.random.default_rng(token_ids)
    return (np.round(generator.standard_normal(VOCAB_SIZE) * 8) / 4).astype(np.float32)


# The reference. It has one row and Python numbers, and shares no code with the sampler.


def reference_logits(params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    x = [float(value) for value in model(prompt + output)]
    banned: set[int] = set()
    if params.allowed_token_ids:
        banned |= set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
    for word in params.bad_words:
        *prefix, last = word
        if not prefix or output[-len(prefix) :] == prefix:
            banned.add(last)
    if len(output) < params.min_tokens:
        banned |= {*params.stop_token_ids, *params.eos_token_ids}
    for token_id, value in zip(params.logit_bias_token_ids, params.logit_bias_values, strict=True):
        x[token_id] += value
    for t in range(VOCAB_SIZE):
        if t in prompt or t in output:
            scale = params.repetition_penalty
            x[t] = x[t] / scale if x[t] > 0 else x[t] * scale
        x[t] -= params.frequency_penalty * output.count(t)
        x[t] -= params.presence_penalty * (t in output)
        if t in banned:
            x[t] = -np.inf
    return x


def reference_token(params: SamplingParams, prompt: list[int], output: list[int]) -> int:
    """The next token. Hypothesis skips the example if rounding could change it."""
    x = [float(np.float32(value)) for value in reference_logits(params, prompt, output)]
    order = sorted(range(VOCAB_SIZE), key=lambda t: (-x[t], t))
    values = sorted(x)
    gaps = np.diff([value for value in values if value > -np.inf])
    assume(not ((gaps > 0) & (gaps < 1e-4)).any())
    if params.temperature == 0:
        return order[0]
    weight = {t: np.exp((x[t] - x[order[0]]) / params.temperature) for t in order}
    kept = [t for t in order if weight[t] >= params.min_p and weight[t] > 0]
    assume(all(abs(weight[t] - params.min_p) > 1e-5 or params.min_p == 0 for t in order))
    kept = kept[: params.top_k or VOCAB_SIZE]
    if params.top_p < 1:
        mass, goal, nucleus = 0.0, params.top_p * sum(weight[t] for t in kept), []
        for t in kept:
            nucleus.append(t)
            mass += weight[t]
            assume(abs(mass - goal) > 1e-5)
            if mass > goal:
                break
        kept = nucleus
    position = len(prompt) + len(output)
    times = {t: exponential_of(params.seed, position, t) / weight[t] for t in kept}
    first, *others = sorted(kept, key=lambda t: times[t])
    assume(not others or times[others[0]] > times[first] * (1 + 1e-5))
    return first


# Requests over several steps.


def run(
    params: SamplingParams,
    prompt: list[int],
    num_tokens: int,
    between: Callable[[Sampler, list[int]], None] = lambda _sampler, _token_ids: None,
) -> list[int]:
    """Runs a request alone. After each step, calls `between` with the sampler and the tokens."""
    sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB_SIZE)
    sampler.add(0, params, np.array(prompt, dtype=np.int32), len(prompt))
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = torch.from_numpy(model(token_ids)[None])
        output = sampler.sample(logits, np.zeros(1, dtype=np.int32))
        assume(len(output.nan_rows) == 0)
        token_ids.append(int(output.token_ids[0]))
        between(sampler, token_ids)
    return token_ids[len(prompt) :]


@settings(deadline=None, max_examples=150)
@given(params=sampling_params, prompt=st.lists(token, min_size=1, max_size=8))
def test_tokens_are_those_of_the_slow_reference(params: SamplingParams, prompt: list[int]) -> None:
    output: list[int] = []
    for token_id in run(params, prompt, num_tokens=5):
        assert token_id == reference_token(params, prompt, output)
        output.append(token_id)


@settings(deadline=None, max_examples=100)
@given(
    requests=st.lists(
        st.tuples(sampling_params, st.lists(token, min_size=1, max_size=5)), min_size=2, max_size=6
    ),
    data=st.data(),
)
def test_other_rows_and_their_order_do_not_matter(
    requests: list[tuple[SamplingParams, list[int]]], data: st.DataObject
) -> None:
    alone = [run(params, prompt, num_tokens=4) for params, prompt in requests]
    size = len(requests)
    row_of = data.draw(st.permutations(range(size + 2)))
    sampler = Sampler(max_num_seqs=size + 2, vocab_size=VOCAB_SIZE)
    token_ids = [list(prompt) for _, prompt in requests]
    for index, (params, prompt) in enumerate(requests):
        sampler.add(row_of[index], params, np.array(prompt, dtype=np.int32), len(prompt))
    waiting = [index for index in range(size) for _ in range(4)]
    while waiting:
        batch = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        logits = torch.from_numpy(np.stack([model(token_ids[index]) for index in batch]))
        rows = np.array([row_of[index] for index in batch], dtype=np.int32)
        sampled = sampler.sample(logits, rows).token_ids
        for index, token_id in zip(batch, sampled.tolist(), strict=True):
            token_ids[index].append(token_id)
            waiting.remove(index)
    for index, (_, prompt) in enumerate(requests):
        assert token_ids[index][len(prompt) :] == alone[index]


@settings(deadline=None, max_examples=100)
@given(
    params=sampling_params,
    prompt=st.lists(token, min_size=1, max_size=5),
    preempted_after=st.sets(st.integers(1, 8)),
)
def test_a_preempted_request_goes_on_as_if_it_had_not_been(
    params: SamplingParams, prompt: list[int], preempted_after: set[int]
) -> None:
    def preempt(sampler: Sampler, token_ids: list[int]) -> None:
        if len(token_ids) - len(prompt) in preempted_after:
            sampler.remove(0)
            sampler.add(0, params, np.array(token_ids, dtype=np.int32), len(prompt))

    assert run(params, prompt, 8, between=preempt) == run(params, prompt, 8)


def sample_once(params: list[SamplingParams], logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Runs a step of requests with one prompt token. Returns the tokens, and rows with NaN."""
    sampler = Sampler(max_num_seqs=len(params), vocab_size=logits.shape[1])
    for row, each in enumerate(params):
        sampler.add(row, each, np.zeros(1, dtype=np.int32), 1)
    output = sampler.sample(logits, np.arange(len(params)))
    return output.token_ids.tolist(), output.nan_rows.tolist()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample_once([SamplingParams(temperature=0)] * 2, logits) == ([1, 0], [])


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=1), SamplingParams(temperature=1e-30), SamplingParams(top_p=1e-9)],
)
def test_limits_of_sampling_are_greedy(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.999]])
    assert sample_once([params], logits) == ([1], [])


def test_a_huge_temperature_leaves_banned_tokens_banned() -> None:
    params = [SamplingParams(temperature=3e38, allowed_token_ids=(1,), seed=s) for s in range(20)]
    assert sample_once(params, torch.randn(20, 5))[0] == [1] * 20


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(), SamplingParams(repetition_penalty=1.5)],
)
def test_a_row_with_nan_is_reported_and_changes_no_other_row(params: SamplingParams) -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    clean, _ = sample_once([params] * 4, logits)
    logits[1, 7] = float("nan")
    logits[2] = -torch.inf
    tokens, nan_rows = sample_once([params] * 4, logits)
    assert nan_rows == [1, 2]
    assert tokens == [clean[0], 0, 0, clean[3]]


def test_a_row_whose_every_token_is_banned_is_reported() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=(1,), bad_words=((1, 1),))
    sampler = Sampler(max_num_seqs=1, vocab_size=3)
    sampler.add(0, params, np.zeros(1, dtype=np.int32), 1)
    outputs = [sampler.sample(torch.zeros(1, 3), np.array([0])) for _ in range(2)]
    assert [output.nan_rows.tolist() for output in outputs] == [[], [0]]


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 10)
    before = logits.clone()
    sample_once([SamplingParams(repetition_penalty=2.0, top_p=0.5), SamplingParams()], logits)
    assert torch.equal(logits, before)


def test_a_row_holds_one_request() -> None:
    sampler = Sampler(max_num_seqs=1, vocab_size=3)
    sampler.add(0, SamplingParams(), np.zeros(1, dtype=np.int32), 1)
    with pytest.raises(ValueError, match="row 0 is taken"):
        sampler.add(0, SamplingParams(), np.zeros(1, dtype=np.int32), 1)
    sampler.remove(0)
    with pytest.raises(ValueError, match="row 0 is free"):
        sampler.remove(0)


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_tokens_come_as_often_as_their_probabilities_say(varied: str) -> None:
    probabilities = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.15, 0.05])
    count = 20_000
    sampler = Sampler(max_num_seqs=count, vocab_size=6)
    for row in range(count):
        seed, length = (row, 1) if varied == "seed" else (9, 1 + row)
        sampler.add(row, SamplingParams(seed=seed), np.broadcast_to(np.int32(0), length), 1)
    logits = torch.log(probabilities).expand(count, 6)
    token_ids = sampler.sample(logits, np.arange(count)).token_ids
    found = np.bincount(token_ids, minlength=6)
    expected = count * probabilities.numpy()
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 35.9  # with 5 degrees of freedom, exceeded by chance once in a million
