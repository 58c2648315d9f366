"""Checks the order of a stream's steps."""

from services.worker.core.errors import InvalidStep


class StepOrder:
    """Checks that all steps of one stream have the same generation of the pool, and that their
    numbers rise. An empty step with number 0 may open the generation. A second step 0 may follow
    it.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._last = -1

    def follow(self, generation: int, step: int, *, is_empty: bool) -> None:
        """Accepts the next step. Raises InvalidStep if its generation differs from the stream's
        generation, or if its number is not above the last step's number.
        """
        if self._generation is None:
            self._generation = generation
            self._last = -1 if is_empty and step == 0 else step
            return
        if generation != self._generation:
            problem = f"{generation} in a stream of {self._generation}"
            raise InvalidStep.in_field(step, "generation", problem)
        if step <= self._last:
            raise InvalidStep.in_field(step, "step", f"it comes after step {self._last}")
        self._last = step
