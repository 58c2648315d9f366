"""Estimates how long steps and KV loads take, from the durations of recent steps and loads."""

from collections import deque
from math import fsum, inf
from statistics import fmean, median

RECENT_STEPS = 64
MIN_STEPS = 8
"""Costs are estimated only after this number of decode-only steps was measured."""
MIN_PROMPT_TOKENS = 16
"""A step with fewer prompt tokens is not used to estimate the cost of a prompt token."""
MIN_COMPUTED_TOKENS = 128
"""The cost of a prompt token is estimated only from at least this number of prompt tokens."""

MAX_FACTOR = 4
"""A step with prompts counts at most as if each token took this factor times the median step's time
per token.
"""

ObservedStep = tuple[int, int, float]
"""The number of requests of a step, its number of tokens, and its duration in seconds."""


class StepCosts:
    """Estimates three costs, in seconds, from recent steps: the cost of a step, of each decoding
    request in a step, and of each prompt token. The first two are fitted to decode-only steps by
    least squares. The cost of a prompt token is the time of steps with prompt tokens, less the
    first two costs, divided by the number of prompt tokens.

    A step that was interrupted, for example while the pool did not reply, has little influence (see
    MAX_FACTOR). Otherwise gateways would send prompts to other replicas, and the cost would stay
    wrong for a long time.
    """

    def __init__(self) -> None:
        self._decoding: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Number of requests and duration in seconds of each decode-only step."""
        self._computing: deque[tuple[int, int, float]] = deque(maxlen=RECENT_STEPS)
        """Number of requests, number of prompt tokens, and seconds of each step with prompts."""
        self._fitted: tuple[float, float] | None = None
        """The costs of a step and of a decoding request. None if they must be fitted again."""
        self._prompt_token: float | None = None
        """The cost of a prompt token. None if it must be computed again."""
        self._loads: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Number of tokens and duration in seconds of each recent KV load."""

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Records that a step took `seconds`. Steps without requests are ignored."""
        if not num_requests:
            return
        num_prompt_tokens = num_tokens - num_requests
        if num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._computing.append((num_requests, num_prompt_tokens, seconds))
            self._prompt_token = None
        elif not num_prompt_tokens:
            self._decoding.append((num_requests, seconds))
            self._fitted = self._prompt_token = None

    def observe_load(self, num_tokens: int, seconds: float) -> None:
        """Records that keys and values of `num_tokens` tokens were loaded within `seconds`."""
        self._loads.append((num_tokens, seconds))

    @property
    def seconds_per_loaded_token(self) -> float:
        """Seconds for each token of the fastest recent KV load, because slower loads have waited
        for other loads or for the end of a step. 0 while unknown.
        """
        return min((seconds / tokens for tokens, seconds in self._loads), default=0.0)

    @property
    def seconds_per_step(self) -> float:
        """Seconds for each step, without the time for its requests. 0 while unknown."""
        return self._fit()[0]

    @property
    def seconds_per_decode(self) -> float:
        """Seconds for each decoding request. 0 while unknown."""
        return self._fit()[1]

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds for each token of a prompt. 0 while unknown."""
        if self._prompt_token is None:
            self._prompt_token = self._seconds_per_prompt_token()
        return self._prompt_token

    def _seconds_per_prompt_token(self) -> float:
        num_tokens = sum(tokens for _, tokens, _ in self._computing)
        if num_tokens < MIN_COMPUTED_TOKENS:
            return 0.0
        each_step, each_decode = self._fit()
        beyond = [
            (max(0.0, seconds - each_step - each_decode * num_requests), tokens)
            for num_requests, tokens, seconds in self._computing
        ]
        limit = MAX_FACTOR * median(seconds / tokens for seconds, tokens in beyond) or inf
        return fsum(min(seconds, limit * tokens) for seconds, tokens in beyond) / num_tokens

    def seconds_of_prompt(self, num_tokens: float, num_requests: int, token_budget: int) -> float:
        """Seconds to compute `num_tokens` tokens of a prompt in steps of `token_budget` prompt
        tokens, while `num_requests` requests decode. If the cost of a prompt token is unknown, for
        example because all prompts are short, the cost of a decoding request is used instead. 0
        while unknown.
        """
        each_step, each_decode = self._fit()
        seconds_per_token = self.seconds_per_prompt_token or each_decode
        seconds_beside = each_step + each_decode * num_requests
        return num_tokens * (seconds_per_token + seconds_beside / token_budget)

    def slowdown(self, num_requests: int, more_requests: int) -> float:
        """The time of a step with `more_requests` requests, divided by the time of a step with
        `num_requests` requests. At most `more_requests / num_requests`. 1 while unknown.
        """
        each_step, each_decode = self._fit()
        seconds = each_step + each_decode * num_requests
        if not seconds or more_requests <= num_requests:
            return 1.0
        return (each_step + each_decode * more_requests) / seconds

    def _fit(self) -> tuple[float, float]:
        if self._fitted is None:
            self._fitted = self._least_squares()
        return self._fitted

    def _least_squares(self) -> tuple[float, float]:
        """Fits the costs of a step and of a request to the decode-only steps. If all these steps
        have equally many requests, the costs cannot be separated. Half of the time then counts as
        the cost of the step, and half as the cost of its requests.
        """
        if len(self._decoding) < MIN_STEPS:
            return 0.0, 0.0
        mean_requests = fmean(num_requests for num_requests, _ in self._decoding)
        mean_seconds = fmean(seconds for _, seconds in self._decoding)
        spread = fsum((n - mean_requests) ** 2 for n, _ in self._decoding)
        if not spread:
            return mean_seconds / 2, mean_seconds / (2 * mean_requests)
        slope = fsum((n - mean_requests) * (s - mean_seconds) for n, s in self._decoding) / spread
        slope = min(max(0.0, slope), mean_seconds / mean_requests)
        return max(0.0, mean_seconds - slope * mean_requests), slope
