"""In random steps, a simulated worker computes the tokens of an oracle."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from services.common.request.sampling import SamplingParams
from services.worker.core.step import StepInput
from services.worker.core.worker import Worker
from tests.worker.options.simulated.oracle import Oracle
from tests.worker.options.simulated.simulated_worker import model_runner, oracle_of, simulated
from tests.worker.runner_driver import Driver, Request, ints
from tests.worker.step_story import new, step

BLOCK_SIZE, NUM_BLOCKS = 4, 400
KINDS = {
    "llama": (None,),
    "mistral_window": (20,),
    "gemma2": (20, None),
    "gemma3": (16, 16, 16, 16, 16, None),
}


@pytest.fixture(scope="module", params=KINDS)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """A worker of a model without windows, with windows, or with layers of both kinds."""
    limits = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_num_seqs": 16}
    worker = simulated(
        tmp_path_factory.mktemp(request.param), request.param, max_model_len=200, **limits
    )
    assert worker.runner.limits.windows == KINDS[request.param]
    return worker


@pytest.mark.parametrize("number", range(12))
def test_no_schedule_changes_a_token(worker: Worker, number: int) -> None:
    """Prompts are computed in chunks of any size, alone or with other requests. Requests are
    preempted, and begin with cached blocks of other requests.
    """
    worker.runner.reset()
    random, oracle = Random(number), oracle_of(worker)
    keeps = number % 2 == 0
    driver = Driver(
        worker.runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, seed=number, keeps=keeps
    )
    stem = _tokens(random, 9, 30)
    requests = [
        Request(
            [*stem, *_tokens(random, 1, 20)],
            random.randint(1, 8),
            SamplingParams(temperature=random.choice((0, 1)), seed=3),
        )
        for _ in range(random.randint(2, 4))
    ]
    expected = [oracle.continuation(one.prompt, one.max_tokens) for one in requests]
    first, running, waiting = requests[0], requests[:1], requests[1:]
    while running or waiting:
        if waiting and random.random() < 0.3:
            running.append(waiting.pop())
            if keeps and first.tables and first.num_computed >= 8:
                driver.share(first, running[-1], random.randint(0, 2))
        chosen = [one for one in running if random.random() < 0.6] or running[:1]
        if chosen:
            driver.step([(one, _chunk(random, one)) for one in chosen])
        driver.remove_finished(running)
        running = [one for one in running if not one.finished]
        if running and random.random() < 0.1 and running[-1].row is not None:
            driver.remove(running[-1])
    assert [one.output for one in requests] == expected


def _tokens(random: Random, least: int, most: int) -> list[int]:
    return random.choices(range(3, 320), k=random.randint(least, most))


def _chunk(random: Random, request: Request) -> int:
    return random.randint(1, min(len(request.tokens) - request.num_computed, 16))


@pytest.fixture
def llama(tmp_path: Path) -> Worker:
    return simulated(tmp_path, block_size=BLOCK_SIZE, num_blocks=100, max_model_len=64)


def _prompt_and_decode(worker: Worker, *, before_decode: dict[int, int], **changes) -> list[int]:
    """Runs a prompt's step and a decode step, and returns their tokens. Between the two, overwrites
    blocks: `before_decode` maps a block to the block from which it gets its contents.
    """
    worker.runner.reset()
    first = worker.runner.execute(step(0, (0, 5, 0), new_requests=(new(0, SamplingParams()),)))
    planes = model_runner(worker).attention.planes
    for target, source in before_decode.items():
        planes[:, target] = planes[:, source]
    second = worker.runner.execute(step(1, (0, 1, 5), **changes))
    return [*first.token_ids.tolist(), *second.token_ids.tolist()]


def test_a_block_with_other_contents_changes_the_next_token(llama: Worker) -> None:
    right = _prompt_and_decode(llama, before_decode={})
    assert right == oracle_of(llama).continuation([7, 8, 9, 10, 11], 2)
    assert _prompt_and_decode(llama, before_decode={1: 50})[0] == right[0]
    assert _prompt_and_decode(llama, before_decode={1: 50})[1] != right[1]


def test_two_blocks_that_change_places_change_the_next_token(llama: Worker) -> None:
    prompt, count = list(range(20, 32)), 12
    outputs = []
    for table in ([1, 2, 3, 4], [2, 1, 3, 4]):
        llama.runner.reset()
        whole = _request(0, prompt, [1, 2, 3, 4])
        llama.runner.execute(step(0, (0, count, 0), new_requests=(whole,)))
        again = _request(0, [*prompt, 5], table)
        removed = ints(0)
        sampled = llama.runner.execute(
            step(1, (0, 1, count), removed_rows=removed, new_requests=(again,))
        )
        outputs.append(sampled.token_ids.tolist())
    assert outputs[0] == [oracle_of(llama).next_token([*prompt, 5])]
    assert outputs[1] != outputs[0]


def test_the_right_tokens_after_a_wrong_prefix_change_the_next_token(llama: Worker) -> None:
    oracle, shared = oracle_of(llama), [40, 41, 42, 43]
    llama.runner.reset()
    mine, other = _request(0, [1, 3, 5, 7, *shared, 9], [1, 2, 3]), [30, 31, 32, 33, *shared]
    theirs = _request(1, other, [4, 5])
    llama.runner.execute(step(0, (0, 9, 0), (1, 8, 0), new_requests=(mine, theirs)))
    follower = _request(2, [1, 3, 5, 7, *shared, 10], [1, 5, 6])
    sampled = llama.runner.execute(step(1, (2, 1, 8), new_requests=(follower,)))
    expected = oracle.next_token([1, 3, 5, 7, *shared, 10])
    assert sampled.token_ids.tolist() != [expected]
    right = _request(3, [1, 3, 5, 7, *shared, 10], [1, 2, 7])
    sampled = llama.runner.execute(step(2, (3, 1, 8), new_requests=(right,)))
    assert sampled.token_ids.tolist() == [expected]


def test_drafts_are_accepted_up_to_the_first_wrong_one(llama: Worker) -> None:
    oracle: Oracle = oracle_of(llama)
    right = oracle.continuation([7, 8, 9, 10, 11], 6)
    llama.runner.reset()
    llama.runner.execute(step(0, (0, 5, 0), new_requests=(new(0, SamplingParams()),)))
    wrong = (right[3] + 1) % 300
    drafted: StepInput = step(
        1,
        (0, 5, 5),
        num_draft_tokens=ints(4),
        draft_token_ids=ints(right[1], right[2], wrong, right[4]),
    )
    output = llama.runner.execute(drafted)
    assert output.token_ids.tolist() == right[1:4]
    output = llama.runner.execute(step(2, (0, 1, 8)))
    assert output.token_ids.tolist() == right[4:5]


def _request(row: int, token_ids: list[int], table: list[int]):
    request = new(row, SamplingParams())
    return type(request)(
        row, ints(*token_ids), len(token_ids), SamplingParams(), (np.array(table, np.int32),)
    )
