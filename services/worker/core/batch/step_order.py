"""Checks the order of a stream's steps."""

from services.worker.core.errors import InvalidStep


class StepOrder:
    """Checks that all steps of a stream have the same generation (the pool's number, which
    increases when the scheduler opens the pool again), and that the steps' own numbers increase.
    The stream may begin with an empty step 0, after which another step 0 may follow.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._last = -1

    def follow(self, generation: int, step: int, *, is_empty: bool) -> None:
        """Accepts the next step. Raises InvalidStep if its generation is not the stream's, or if
        its number is not greater than the last step's number.
        """
        if self._generation is None:
            self._generation = generation
            self._last = -1 if is_empty and step == 0 else step
            return
        if generation != self._generation:
            problem = f"is {generation}, but the stream belongs to generation {self._generation}"
            raise InvalidStep.in_field(step, "generation", problem)
        if step <= self._last:
            raise InvalidStep.in_field(
                step, "step", f"must be above {self._last}, the number of the last step"
            )
        self._last = step
