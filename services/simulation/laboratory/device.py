"""The step times of a simulated device, computed for single steps and for runs of equal steps."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from services.scheduler.core.output import SchedulerOutput
from services.worker.core.step_times import ServingCosts, StepTimes


class Device:
    """Computes step times as `services/worker/core/step_times.py` defines them, and adds the costs
    of serving.
    """

    def __init__(self, times: StepTimes, serving: ServingCosts) -> None:
        self._times = times
        self._serving = serving

    def seconds(self, plan: SchedulerOutput) -> float:
        """The time of a step in seconds. 0 for a step without requests."""
        num_requests, starts = len(plan.requests), plan.num_computed_tokens
        new_requests = self._serving.seconds_per_new_request * len(plan.new)
        if plan.num_tokens == num_requests:
            return new_requests + self.decode_seconds(num_requests, sum(starts) + num_requests)
        return new_requests + self._mixed_seconds(plan.num_scheduled_tokens, starts)

    def decode_seconds(self, num_requests: int, context: int) -> float:
        """The time of a step that computes one token per request. `context` is the sum of the
        requests' numbers of tokens, including the computed tokens.
        """
        if not num_requests:
            return 0.0
        fixed, per_context = self._decode_costs(num_requests)
        return fixed + per_context * context

    def decode_ends(
        self, now: float, num_requests: int, context: int, num_steps: int
    ) -> list[float]:
        """Returns the end times of `num_steps` steps, each of which computes one token for each of
        the same requests. The first step begins at `now`.
        """
        fixed, per_context = self._decode_costs(num_requests)
        contexts = range(context, context + num_steps * num_requests, num_requests)
        steps = [fixed + per_context * one for one in contexts]
        return list(accumulate(steps, initial=now))[1:]

    def alone_seconds(
        self, num_cached: int, num_prompt: int, num_output: int, budget: int
    ) -> float:
        """The time of a request that is alone on the device. The first `num_cached` tokens of its
        prompt are cached.
        """
        seconds, start = self._serving.seconds_per_new_request, min(num_cached, num_prompt - 1)
        while start < num_prompt:
            count = min(budget, num_prompt - start)
            seconds += (
                self.decode_seconds(1, start + 1)
                if count == 1
                else self._mixed_seconds((count,), (start,))
            )
            start += count
        steps = num_output - 1
        first, last = num_prompt + 1, num_prompt + steps
        mean = (self.decode_seconds(1, first) + self.decode_seconds(1, last)) / 2
        return seconds + steps * mean

    def seconds_per_prompt_token(self, budget: int) -> float:
        """The time that a prompt token adds to a step, on average over `budget` tokens."""
        more = partial(self._times.mixed.without_contexts, num_requests=1)
        return (more(budget) - more(1)) / max(1, budget - 1)

    def seconds_per_decode(self, most: int) -> float:
        """The time that a request adds to a decode step, on average over `most` requests."""
        return (self._decode_costs(most)[0] - self._decode_costs(1)[0]) / max(1, most - 1)

    def _decode_costs(self, num_requests: int) -> tuple[float, float]:
        """Returns a decode step's fixed time, and its time for each token of the contexts."""
        costs = self._times.decode
        fixed = costs.without_contexts(num_requests, num_requests)
        return fixed + self._serving.of_step(num_requests), costs.seconds_per_decoded_context

    def _mixed_seconds(self, counts: Sequence[int], starts: Sequence[int]) -> float:
        num_tokens = new_context = decoded_context = 0
        for count, start in zip(counts, starts, strict=True):
            num_tokens += count
            if count == 1:
                decoded_context += start + 1
            else:
                new_context += count * start + count * (count + 1) // 2
        costs = self._times.costs(num_tokens, len(counts))
        return (
            costs.without_contexts(num_tokens, len(counts))
            + self._serving.of_step(len(counts))
            + costs.seconds_per_new_context * new_context
            + costs.seconds_per_decoded_context * decoded_context
        )
