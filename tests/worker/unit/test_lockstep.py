"""Ranks run the same steps. They drop outdated steps, and end the group if their steps differ."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import Aborted, InvalidArgument
from services.worker.core.errors import InvalidStep
from services.worker.core.lockstep import Lockstep
from services.worker.core.step import StepInput, StepOutput
from services.worker.parallel.errors import GroupBroken, RankLost, RankStopped
from services.worker.parallel.group import Timeouts
from tests.tiny_models import save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner, ints


def step(generation: int, number: int) -> StepInput:
    return StepInput(generation, number, ints(0), ints(1), ints(number))


def answering(token: int):
    return lambda step: StepOutput(step.generation, step.step, ints(1), ints(token))


def lockstep(thread: RankThread, every: int = 1) -> Lockstep:
    return Lockstep(thread.ranks, every, thread.group.watch.explain)


def test_a_step_of_an_older_generation_is_dropped_when_a_newer_one_comes() -> None:
    # Rank 0 begins a step that rank 1 never receives, as if the stream of rank 1 had ended.
    def work(thread: RankThread) -> list[int]:
        own, tokens = lockstep(thread), []
        for number in range(3):
            tokens.append(own.run(step(1, number), answering(5)).step)
        if thread.ranks.rank == 0:
            with pytest.raises(Aborted):
                own.run(step(1, 3), answering(5))
        for number in range(4):
            tokens.append(own.run(step(2, number), answering(6)).step)
        return tokens

    assert on_ranks(2, work) == [[0, 1, 2, 0, 1, 2, 3]] * 2


def test_a_step_that_is_refused_everywhere_breaks_nothing() -> None:
    def refuse(_: StepInput) -> StepOutput:
        raise InvalidArgument("no such row")

    def work(thread: RankThread) -> bool:
        own = lockstep(thread)
        with pytest.raises(InvalidArgument):
            own.run(step(1, 0), refuse)
        own.run(step(1, 1), answering(5))
        return thread.broken.done()

    assert on_ranks(2, work) == [False, False]


@pytest.mark.parametrize("field", ["step", "digest"])
def test_all_ranks_refuse_a_step_if_one_rank_was_sent_another(field: str) -> None:
    def work(thread: RankThread) -> bool:
        own, sent = lockstep(thread), step(1, 0)
        setattr(sent, field, thread.ranks.rank)
        with pytest.raises(
            InvalidStep, match="the scheduler sent a different step to another rank"
        ):
            own.run(sent, answering(5))
        own.run(step(2, 0), answering(5))
        return thread.broken.done()

    assert on_ranks(2, work) == [False, False]


@pytest.mark.parametrize(("every", "found_at"), [(1, 3), (4, 6)])
def test_different_tokens_end_the_group(every: int, found_at: int) -> None:
    def work(thread: RankThread) -> tuple[int, str]:
        own = lockstep(thread, every)
        for number in range(10):
            differs = thread.ranks.rank == 1 and number >= 1
            try:
                own.run(step(1, number), answering(6 if differs else 5))
            except GroupBroken:
                return number, str(thread.broken.result(60))
        raise AssertionError("no rank noticed")

    for number, why in on_ranks(2, work):
        assert number == found_at
        assert f"different results in step {found_at - 2}" in why


def test_different_weights_in_memory_end_the_group_even_if_tokens_are_equal(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path)

    def work(thread: RankThread) -> str:
        runner = build_runner(tmp_path, ranks=thread.ranks, lockstep=lockstep(thread, 4))
        driver, request = Driver(runner, block_size=16, num_blocks=600), Request([5, 6, 7], 40)
        driver.step([(request, 3)])
        if thread.ranks.rank == 1:
            runner.model._weights.embedding[9:] += 1e-3
        with pytest.raises(GroupBroken):
            driver.run([request])
        return str(thread.broken.result(60))

    for why in on_ranks(2, work):
        assert "different results" in why


def test_a_rank_that_fails_says_why_to_all() -> None:
    def fail(_: StepInput) -> StepOutput:
        raise RuntimeError("out of memory\nat some place")

    def work(thread: RankThread) -> str:
        own = lockstep(thread)
        if thread.ranks.rank == 1:
            with pytest.raises(GroupBroken):
                own.run(step(1, 0), fail)
        else:
            own.run(step(1, 0), answering(5))
        return str(thread.broken.result(60))

    first, second = on_ranks(2, work)
    assert second == "step 0 failed on rank 1: out of memory"
    assert first == f"rank 1 has ended: {second}"


@pytest.mark.parametrize(("is_stopped", "noticed"), [(False, RankLost), (True, RankStopped)])
def test_a_rank_that_leaves_is_noticed_while_nothing_runs(
    is_stopped: bool, noticed: type[GroupBroken]
) -> None:
    left = threading.Event()

    def work(thread: RankThread) -> tuple[type[GroupBroken], float]:
        if thread.ranks.rank == 1:
            thread.group.close(is_stopped=is_stopped)
            left.set()
            return noticed, 0
        assert left.wait(60)
        began = time.monotonic()
        return type(thread.broken.result(60)), time.monotonic() - began

    for kind, seconds in on_ranks(3, work):
        assert kind is noticed
        assert seconds < 20


def test_the_wait_for_a_rank_at_a_step_has_a_timeout() -> None:
    def work(thread: RankThread) -> str:
        if thread.ranks.rank == 0:
            with pytest.raises(GroupBroken):
                lockstep(thread).run(step(1, 0), answering(5))
        return str(thread.broken.result(10))

    first, second = on_ranks(2, work, Timeouts(join_seconds=20, collective_seconds=1))
    assert first.startswith("step 0 failed on rank 0")
    assert second == f"rank 0 has ended: {first}"


def test_a_digest_depends_on_input_and_output() -> None:
    def work(thread: RankThread) -> str:
        own = lockstep(thread)
        row = thread.ranks.rank
        for number in range(2):
            own.run(StepInput(1, number, ints(row), ints(1), ints(number)), answering(5))
        with pytest.raises(GroupBroken):
            own.run(StepInput(1, 2, ints(row), ints(1), ints(2)), answering(5))
        return str(thread.broken.result(60))

    assert all("different results in step 0" in why for why in on_ranks(2, work))


def test_ranks_agree_on_their_common_values() -> None:
    def work(thread: RankThread) -> tuple[int, str]:
        group, rank = thread.group, thread.ranks.rank
        least = group.smallest("num_blocks", 100 - rank)
        with pytest.raises(GroupBroken) as error:
            group.require_same({"dtype": "float32", "max_num_seqs": str(8 + rank)})
        return least, str(error.value)

    assert on_ranks(2, work) == [(99, "max_num_seqs is 8 on rank 0, but 9 on rank 1")] * 2


def test_arrays_of_any_shape_join_a_digest() -> None:
    # Includes empty arrays, as in empty steps, and bfloat16 matrices, as hidden states are.
    def work(thread: RankThread) -> int:
        own = lockstep(thread)

        def begin(step: StepInput) -> StepOutput:
            own.add_hidden_states(torch.ones(2, 4, dtype=torch.bfloat16))
            empty = np.empty(0, np.int32)
            return StepOutput(step.generation, step.step, empty, empty)

        return [own.run(step(1, number), begin).step for number in range(4)][-1]

    assert on_ranks(2, work) == [3, 3]
