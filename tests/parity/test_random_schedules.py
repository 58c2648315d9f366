"""Under any schedule, requests in float32 get the tokens and log-probabilities that transformers
computes. In bfloat16 a request's log-probabilities have the same bits as when it runs alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting, KVCacheDtype
from services.worker.core.drafts.draft_source import SuffixSource
from services.worker.core.lockstep import Lockstep
from services.worker.core.model_runner import ModelRunner
from tests.parity.exact import assert_same_answer
from tests.parity.oracle import assert_served, embedded_prompt
from tests.parity.proposers import KnownProposer, RandomProposer
from tests.parity.random_serving import Happened, RandomServing
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner
from tests.worker.suffix_reference import suffix_trees

MAX_NUM_SEQS = 6
MOST_TOKENS = 70
GROUPS = {"gemma3": 6, "llama": 1, "mixtral": 1, "qwen2_window": 3}
"""The number of KV-cache groups of each kind of model."""


@dataclass(frozen=True)
class Schedule:
    """The seed and the settings of a random schedule."""

    seed: int
    block_size: int
    max_chunk: int


schedules = st.builds(
    Schedule,
    seed=st.integers(0, 2**32 - 1),
    block_size=st.sampled_from([4, 1, 2, 3, 8, 16]),
    max_chunk=st.sampled_from([7, 1, 3, 64]),
)


three_examples = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Served:
    """A model loaded by transformers, and its directory."""

    model: PreTrainedModel
    directory: Path
    num_groups: int

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    def runner(self, schedule: Schedule, **options: Any) -> ModelRunner:
        """A model runner whose KV cache can store all requests, and little more."""
        each = -(-MOST_TOKENS // schedule.block_size) + 1
        return build_runner(
            self.directory,
            block_size=schedule.block_size,
            num_blocks=MAX_NUM_SEQS * each * self.num_groups,
            max_num_seqs=MAX_NUM_SEQS,
            dtype=self.model.dtype,
            **options,
        )


@pytest.fixture(scope="module", params=GROUPS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(directory, request.param)
    return Served(model, directory, GROUPS[request.param])


@pytest.fixture(scope="module", params=GROUPS)
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(directory, request.param, dtype=torch.bfloat16, **TILED)
    return Served(model, directory, GROUPS[request.param])


def make_requests(schedule: Schedule, hidden_size: int) -> list[Request]:
    """Six requests with prompts of 1 to 50 tokens and outputs of 1 to 20. Most have a common
    prefix, and one prompt is embeddings.
    """
    random = np.random.default_rng(schedule.seed)
    stem = random.integers(3, VOCAB_SIZE, 40).tolist()
    requests = []
    for number in range(MAX_NUM_SEQS):
        own = random.integers(3, VOCAB_SIZE, random.integers(1, 11)).tolist()
        sampling = SamplingParams(
            temperature=0,
            logprobs=[None, 0, 3][number % 3],
            prompt_logprobs=1 if number == 1 else None,
        )
        prompt = stem[: random.integers(0, 41)] + own
        requests.append(Request(prompt, int(random.integers(1, 21)), sampling))
    rows = torch.from_numpy(random.standard_normal((len(stem) // 2, hidden_size), np.float32))
    last = requests[-1]
    last.embeds = embedded_prompt(rows)
    last.prompt = [*last.embeds.placeholders, *own]
    return requests


def serve(
    runner: ModelRunner, schedule: Schedule, hidden_size: int, known: KnownProposer | None = None
) -> tuple[list[Request], Happened]:
    """Serves the requests twice. In the second run, the outputs of the first run are the drafts, or
    the sequences that the proposer `known` continues.
    """
    serving = RandomServing(runner, max_chunk=schedule.max_chunk, seed=schedule.seed)
    first, second = make_requests(schedule, hidden_size), make_requests(schedule, hidden_size)
    serving.run(first, {})
    if known is not None:
        known.sequences += [request.tokens for request in first]
    serving.run(second, {tuple(request.prompt): request.output for request in first})
    return [*first, *second], serving.happened


def check(served: Served, requests: list[Request]) -> None:
    for number, request in enumerate(requests):
        assert_served(served.model, request, f"request {number}")


def check_alone(runner: ModelRunner, schedule: Schedule, requests: list[Request]) -> None:
    """Serves each request alone, its prompt in one step. The answer must have the same bits."""
    runner.reset()
    driver = Driver(runner, block_size=schedule.block_size, num_blocks=runner.limits.num_blocks)
    for number, request in enumerate(requests):
        alone = Request(request.prompt, request.max_tokens, request.sampling, embeds=request.embeds)
        driver.run([alone])
        assert_same_answer(request, alone, f"request {number}")


@pytest.mark.parametrize("kernels", [KernelsSetting.AUTO, KernelsSetting.TORCH])
@three_examples
@given(schedule=schedules)
def test_any_schedule_gives_the_tokens_of_transformers(
    served: Served, schedule: Schedule, kernels: KernelsSetting
) -> None:
    runner = served.runner(schedule, kernels_setting=kernels)
    requests, _ = serve(runner, schedule, served.hidden_size)
    check(served, requests)


@three_examples
@given(schedule=schedules)
def test_any_schedule_gives_the_bits_of_each_request_alone(
    rounded: Served, schedule: Schedule
) -> None:
    runner = rounded.runner(schedule, kernels_setting=KernelsSetting.NATIVE)
    requests, _ = serve(runner, schedule, rounded.hidden_size)
    check_alone(runner, schedule, requests)


@three_examples
@given(schedule=schedules)
def test_a_model_that_drafts_for_itself_is_always_right(
    rounded: Served, schedule: Schedule
) -> None:
    runner = rounded.runner(schedule, draft_model=rounded.directory)
    requests, happened = serve_tokens(runner, schedule)
    check_alone(rounded.runner(schedule), schedule, requests)
    assert happened.accepted == happened.drafts


def test_a_model_that_drafts_for_itself_is_always_right_with_codes(rounded: Served) -> None:
    schedule = Schedule(seed=0, block_size=4, max_chunk=7)
    codes = KVCacheDtype.INT8_PER_TOKEN_HEAD
    runner = rounded.runner(schedule, draft_model=rounded.directory, kv_cache_dtype=codes)
    requests, happened = serve_tokens(runner, schedule)
    check_alone(rounded.runner(schedule, kv_cache_dtype=codes), schedule, requests)
    assert happened.accepted == happened.drafts > 20


def serve_tokens(
    runner: ModelRunner, schedule: Schedule, times: int = 2
) -> tuple[list[Request], Happened]:
    """Serves the requests `times` times, without embeddings, which a draft model cannot compute."""
    serving = RandomServing(runner, max_chunk=schedule.max_chunk, seed=schedule.seed)
    served = [make_requests(schedule, hidden_size=1)[:-1] for _ in range(times)]
    for requests in served:
        serving.run(requests, {})
    return [request for requests in served for request in requests], serving.happened


def test_two_ranks_draft_with_a_model_of_two_ranks(served: Served) -> None:
    schedule = Schedule(seed=3, block_size=4, max_chunk=7)

    def work(thread: RankThread) -> tuple[list[Request], Happened]:
        lockstep = Lockstep(thread.ranks, 1, thread.group.watch.explain)
        ranks = thread.ranks
        runner = served.runner(
            schedule, ranks=ranks, lockstep=lockstep, draft_model=served.directory
        )
        return serve_tokens(runner, schedule)

    (requests, happened), (others, _) = on_ranks(2, work)
    check(served, requests)
    assert [request.output for request in others] == [request.output for request in requests]
    assert happened.accepted == happened.drafts > 20


def test_two_ranks_draft_alike_from_what_others_wrote(served: Served) -> None:
    schedule = Schedule(seed=3, block_size=4, max_chunk=7)

    def work(thread: RankThread) -> tuple[list[Request], Happened]:
        lockstep = Lockstep(thread.ranks, 1, thread.group.watch.explain)
        source = SuffixSource(suffix_trees())
        runner = served.runner(schedule, ranks=thread.ranks, lockstep=lockstep, source=source)
        return serve_tokens(runner, schedule, times=5)

    (requests, happened), (others, _) = on_ranks(2, work)
    check(served, requests)
    assert [request.output for request in others] == [request.output for request in requests]
    assert happened.drafts > happened.accepted > 5


def test_any_schedule_on_two_ranks_gives_the_tokens_of_transformers(served: Served) -> None:
    schedule = Schedule(seed=3, block_size=4, max_chunk=7)

    def work(thread: RankThread) -> tuple[list[Request], Happened]:
        runner = served.runner(schedule, ranks=thread.ranks)
        return serve(runner, schedule, served.hidden_size)

    (requests, happened), (others, _) = on_ranks(2, work)
    check(served, requests)
    assert [request.output for request in others] == [request.output for request in requests]
    assert min(vars(happened).values()) > 1, happened


def test_any_schedule_on_two_ranks_gives_the_bits_of_each_request_alone(rounded: Served) -> None:
    schedule = Schedule(seed=3, block_size=4, max_chunk=7)

    def work(thread: RankThread) -> Happened:
        lockstep = Lockstep(thread.ranks, 1, thread.group.watch.explain)
        known = KnownProposer([])
        runner = rounded.runner(
            schedule, ranks=thread.ranks, lockstep=lockstep, proposer=RandomProposer(known)
        )
        requests, happened = serve(runner, schedule, rounded.hidden_size, known)
        check_alone(rounded.runner(schedule, ranks=thread.ranks), schedule, requests)
        return happened

    happened, other = on_ranks(2, work)
    assert happened == other
    assert min(vars(happened).values()) > 1, happened
