"""Checks the order of a stream's steps."""

from services.worker.core.errors import InvalidStep


class StepOrder:
    """Checks that all steps of a stream have the same generation of the pool, and that their
    numbers increase. The first step may be an empty step 0, which opens the generation. Another
    step 0 may follow it.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._last = -1

    def follow(self, generation: int, step: int, *, is_empty: bool) -> None:
        """Accepts the next step. Raises InvalidStep if its generation differs from the generation
        of the stream, or if its number is not greater than the last step's number.
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
