"""The time that a step takes for each prompt token and for each decoding request in it."""

from collections import deque
from statistics import fmean

RECENT_STEPS = 64
MIN_STEPS = 8
"""Fewest steps that only decode from which costs are estimated."""
MIN_PROMPT_TOKENS = 16
"""Fewest prompt tokens of a step from which the cost of prompts is estimated."""
MIN_COMPUTED_TOKENS = 128
"""Fewest prompt tokens in all recent steps from which the cost of prompts is estimated."""


class StepCosts:
    """Fits the times of recent steps to three costs, in seconds: one of the step itself, one for
    each request that decodes, and one for each further token, which is one of a prompt.

    The first two come from steps without prompts, by least squares; the last one is what steps with
    prompts take beyond them.
    """

    def __init__(self) -> None:
        self._decoding: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Requests and seconds of steps in which each request got one token."""
        self._computing: deque[tuple[int, int, float]] = deque(maxlen=RECENT_STEPS)
        """Requests, further tokens and seconds of the others."""
        self._fitted: tuple[float, float] | None = None
        """The costs by the steps so far; None if they were not asked for since the last step."""

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Records the time of a step. Steps without requests, which carry transfers or free rows,
        are left out.
        """
        if not num_requests:
            return
        num_prompt_tokens = num_tokens - num_requests
        if num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._computing.append((num_requests, num_prompt_tokens, seconds))
        elif not num_prompt_tokens:
            self._decoding.append((num_requests, seconds))
            self._fitted = None

    @property
    def seconds_per_decode(self) -> float:
        """Seconds for each request that decodes; 0 while it is not known."""
        return self._fit()[1]

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds for each token of a prompt; 0 while it is not known."""
        num_tokens = sum(tokens for _, tokens, _ in self._computing)
        if num_tokens < MIN_COMPUTED_TOKENS:
            return 0.0
        each_step, each_decode = self._fit()
        beyond = sum(
            max(0.0, seconds - each_step - each_decode * num_requests)
            for num_requests, _, seconds in self._computing
        )
        return beyond / num_tokens

    def seconds_of_prompt(self, num_tokens: float, num_requests: int, token_budget: int) -> float:
        """The time to compute `num_tokens` of a prompt, in steps whose budget is full of prompts
        and in which `num_requests` decode; 0 while it is not known. While the cost of a prompt's
        token is not known, as with very short prompts, that of a decoding request is used.
        """
        each_step, each_decode = self._fit()
        seconds_per_token = self.seconds_per_prompt_token or each_decode
        seconds_beside = each_step + each_decode * num_requests
        return num_tokens * (seconds_per_token + seconds_beside / token_budget)

    def slowdown(self, num_requests: int, more_requests: int) -> float:
        """How many times as long a step takes that has more requests; 1 while it is not known.

        At most as many times as there are more requests: each one takes no more than its part.
        """
        each_step, each_decode = self._fit()
        seconds = each_step + each_decode * num_requests
        if not seconds or more_requests <= num_requests:
            return 1.0
        return (each_step + each_decode * more_requests) / seconds

    def _fit(self) -> tuple[float, float]:
        """Seconds of every step, and for each request in it; 0 while they are not known."""
        if self._fitted is None:
            self._fitted = self._least_squares()
        return self._fitted

    def _least_squares(self) -> tuple[float, float]:
        """Computes what `_fit` returns.

        Steps of one size do not show which is which: a half of their time is taken for each.
        """
        if len(self._decoding) < MIN_STEPS:
            return 0.0, 0.0
        mean_requests = fmean(num_requests for num_requests, _ in self._decoding)
        mean_seconds = fmean(seconds for _, seconds in self._decoding)
        spread = sum((n - mean_requests) ** 2 for n, _ in self._decoding)
        if not spread:
            return mean_seconds / 2, mean_seconds / (2 * mean_requests)
        slope = sum((n - mean_requests) * (s - mean_seconds) for n, s in self._decoding) / spread
        slope = min(max(0.0, slope), mean_seconds / mean_requests)
        return mean_seconds - slope * mean_requests, slope
