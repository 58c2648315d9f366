"""The order of the steps of one stream: each runs once, and none before an earlier one."""

from services.worker.core.errors import InvalidStep


class StepOrder:
    """Follows the numbers of the steps of one stream, which are of one generation and rise. After
    an empty step 0, which opens the generation, a step 0 may follow.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._last = -1

    def follow(self, generation: int, step: int, *, is_empty: bool) -> None:
        """Takes in the next step. Raises InvalidStep if it is of another generation than those
        before, or comes again, or too late.
        """
        if self._generation is None:
            self._generation = generation
            self._last = -1 if is_empty and step == 0 else step
            return
        if generation != self._generation:
            raise InvalidStep(
                f"step {step}: generation: {generation} in a stream of {self._generation}",
                field="generation",
            )
        if step <= self._last:
            raise InvalidStep(f"step {step}: step: it comes after step {self._last}", field="step")
        self._last = step
