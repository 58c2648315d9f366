"""Each step of a stream must arrive once, in order, and with the stream's generation number."""

import pytest

from services.worker.core.batch.step_order import StepOrder
from services.worker.core.errors import InvalidStep


def test_steps_rise_after_an_opening_one_of_any_number() -> None:
    order = StepOrder()
    for number, is_empty in ((0, True), (0, False), (1, False), (5, True), (6, False)):
        order.follow(7, number, is_empty=is_empty)


@pytest.mark.parametrize("number", [4, 5])
def test_a_step_that_comes_again_or_too_late_is_refused(number: int) -> None:
    order = StepOrder()
    order.follow(7, 5, is_empty=False)
    with pytest.raises(
        InvalidStep, match=(f"step {number}: step: must be above 5, the number of the last step")
    ):
        order.follow(7, number, is_empty=True)


def test_a_step_of_another_generation_is_refused() -> None:
    order = StepOrder()
    order.follow(7, 0, is_empty=True)
    with pytest.raises(
        InvalidStep, match="step 1: generation: is 8, but the stream belongs to generation 7"
    ):
        order.follow(8, 1, is_empty=False)
