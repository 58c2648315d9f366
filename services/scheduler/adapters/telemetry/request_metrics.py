"""vLLM's histograms and counters of requests, which the engine's observer updates.

In most steps one token arrives for each request. If two such steps follow each other, the time
since the last token is equal for all requests that are in both steps, and is computed only once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.request.finish import FinishReason
from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import by_label, single, vllm
from services.scheduler.core.output import EngineCoreOutputs, SchedulerOutput
from services.scheduler.core.request import Request

_HISTOGRAMS = (
    vllm.TIME_TO_FIRST_TOKEN,
    vllm.INTER_TOKEN_LATENCY,
    vllm.REQUEST_TIME_PER_OUTPUT_TOKEN,
    vllm.E2E_REQUEST_LATENCY,
    vllm.REQUEST_QUEUE_TIME,
    vllm.REQUEST_PREFILL_TIME,
    vllm.REQUEST_DECODE_TIME,
    vllm.REQUEST_INFERENCE_TIME,
    vllm.REQUEST_PROMPT_TOKENS,
    vllm.REQUEST_GENERATION_TOKENS,
    vllm.REQUEST_MAX_NUM_GENERATION_TOKENS,
    vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS,
    vllm.REQUEST_PARAMS_N,
    vllm.REQUEST_PARAMS_MAX_TOKENS,
    vllm.ITERATION_TOKENS,
)
ERROR = "error"
_FINISHED_REASONS = (
    FinishReason.STOP.value,
    FinishReason.LENGTH.value,
    FinishReason.ABORT.value,
    FinishReason.REPETITION.value,
    ERROR,
)
"""vLLM's finish reasons. All other reasons count as errors, except timeouts in the queue."""


@dataclass(slots=True)
class _Times:
    """The times of a request, in seconds of the monotonic clock."""

    arrived: float
    """Time of arrival at the gateway, if the gateway's and the scheduler's clocks agree."""
    queued: float
    num_output_before: int
    """Number of output tokens that another replica generated before the request moved here."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0


class RequestMetrics(Collector):
    """Measures requests, and exports vLLM's metrics of them."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._unix_seconds = unix_seconds
        self._requests: dict[Request, _Times] = {}
        self._steady: Sequence[Request] = ()
        """The last step's unfinished requests, if each had one new token. Otherwise empty."""
        self._steady_at = 0.0
        self._histograms = {name: Histogram(name) for name in _HISTOGRAMS}
        self._observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        self._iteration_tokens = self._histograms[vllm.ITERATION_TOKENS]
        self._latency = self._histograms[vllm.INTER_TOKEN_LATENCY]
        self._num_finished: Counter[str] = Counter(dict.fromkeys(_FINISHED_REASONS, 0))
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_external_tokens = 0
        self._num_generation_tokens = 0

    def arrived(self, requests: Sequence[Request]) -> None:
        now, unix = self._monotonic(), self._unix_seconds()
        for request in requests:
            since_queued = max(0.0, unix - request.queued_unix_nanos / 1e9)
            since_arrival = max(since_queued, unix - request.arrival_time)
            self._requests[request] = _Times(
                now - since_arrival, now - since_queued, request.num_output_tokens
            )

    def admitted(self, requests: Sequence[Request]) -> None:
        """Records that requests were admitted for the first time."""
        for request in requests:
            times = self._requests.get(request)
            if times is not None and times.scheduled is None:
                times.scheduled = self._monotonic()
                if request.num_choices:
                    self._observe[vllm.REQUEST_PARAMS_N](request.num_choices)

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        now, num_tokens = self._monotonic(), update.num_tokens
        self._num_generation_tokens += num_tokens
        has_drafts, num_computed = bool(plan.draft_token_ids), plan.num_tokens
        if has_drafts:
            # Drafts that the workers did not propose were scheduled but not computed.
            num_scheduled = sum(map(len, plan.draft_token_ids.values()))
            num_computed -= num_scheduled - sum(update.num_draft_tokens)
        if plan.requests:
            self._iteration_tokens.observe(num_computed)
        if num_tokens == len(plan.requests) and not has_drafts:
            self._count_one_each(plan.requests, now)
        else:
            self._leave_steady()
            for request, tokens in zip(plan.requests, update.token_ids, strict=True):
                if tokens and (times := self._requests.get(request)) is not None:
                    self._count_tokens(request, times, len(tokens), now)
        if update.ended or update.turns:
            self._end(update)

    def _count_one_each(self, requests: Sequence[Request], now: float) -> None:
        if requests == self._steady:
            self._latency.observe(now - self._steady_at, len(requests))
        else:
            before, since = set(self._steady), now - self._steady_at
            joined = [request for request in requests if request not in before]
            if len(joined) < len(requests):
                self._latency.observe(since, len(requests) - len(joined))
            self._note_last_tokens(before.difference(requests))
            for request in joined:
                if (times := self._requests.get(request)) is not None:
                    self._count_tokens(request, times, 1, now)
        self._steady, self._steady_at = requests, now

    def _end(self, update: EngineCoreOutputs) -> None:
        """Records requests, and turns of sessions (requests with several turns), that ended."""
        over = {*update.ended, *update.turns}
        self._note_last_tokens(over.intersection(self._steady))
        self._steady = [request for request in self._steady if request not in over]
        for request in update.ended:
            self._end_request(request)
        for session, end in update.turns.items():
            if (of_turn := self._requests.pop(session, None)) is not None:
                self._ended(end.turn, of_turn)

    def ended(self, requests: Iterable[Request]) -> None:
        """Records the ends of requests between steps."""
        if self._steady:
            self._leave_steady()
        for request in requests:
            self._end_request(request)

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms.values():
            yield histogram.metric()
        yield by_label(vllm.REQUEST_SUCCESS, self._num_finished)
        num_prompt, num_cached = self._num_prompt_tokens, self._num_cached_tokens
        yield single(vllm.PROMPT_TOKENS, num_prompt)
        yield single(vllm.PROMPT_TOKENS_CACHED, num_cached)
        yield single(vllm.GENERATION_TOKENS, self._num_generation_tokens)
        sources = {
            "local_compute": num_prompt - num_cached,
            "local_cache_hit": num_cached - self._num_external_tokens,
            "external_kv_transfer": self._num_external_tokens,
        }
        yield by_label(vllm.PROMPT_TOKENS_BY_SOURCE, sources)

    def _leave_steady(self) -> None:
        self._note_last_tokens(self._steady)
        self._steady = ()

    def _note_last_tokens(self, requests: Iterable[Request]) -> None:
        """Stores the time of the requests' last token, because the next step may have no token."""
        for request in requests:
            if (times := self._requests.get(request)) is not None:
                times.last_token = self._steady_at

    def _end_request(self, request: Request) -> None:
        times = self._requests.pop(request, None)
        if times is not None and request.finish_reason is not FinishReason.QUEUE_TIMEOUT:
            self._ended(request, times)

    def _count_tokens(self, request: Request, times: _Times, num_tokens: int, now: float) -> None:
        if times.first_token is not None:
            self._latency.observe((now - times.last_token) / num_tokens, num_tokens)
        else:
            times.first_token = now
            if not times.num_output_before:  # otherwise another replica has counted them
                first_token = self._histograms[vllm.TIME_TO_FIRST_TOKEN]
                first_token.observe_traced(now - times.arrived, _trace_id(request))
                self._num_prompt_tokens += request.num_prompt_tokens
                num_cached = _num_cached(request)
                self._num_cached_tokens += num_cached
                self._num_external_tokens += min(num_cached, request.num_external_tokens)
        times.last_token = now

    def _ended(self, request: Request, times: _Times) -> None:
        reason = ERROR if request.finish_reason is None else request.finish_reason.value
        self._num_finished[reason if reason in _FINISHED_REASONS else ERROR] += 1
        if times.scheduled is None:
            return
        observe = self._observe
        scheduled, first, last = times.scheduled, times.first_token, times.last_token
        trace_id, histograms = _trace_id(request), self._histograms
        e2e = histograms[vllm.E2E_REQUEST_LATENCY]
        e2e.observe_traced(self._monotonic() - times.arrived, trace_id)
        queue = histograms[vllm.REQUEST_QUEUE_TIME]
        queue.observe_traced(scheduled - times.queued, trace_id)
        num_generated = request.num_output_tokens - times.num_output_before
        if first is not None:
            observe[vllm.REQUEST_PREFILL_TIME](first - scheduled)
            observe[vllm.REQUEST_DECODE_TIME](last - first)
            observe[vllm.REQUEST_INFERENCE_TIME](last - scheduled)
            if num_generated > 1:
                mean = (last - first) / (num_generated - 1)
                observe[vllm.REQUEST_TIME_PER_OUTPUT_TOKEN](mean)
        num_prompt = request.num_prompt_tokens
        observe[vllm.REQUEST_PROMPT_TOKENS](num_prompt)
        computed = num_prompt - _num_cached(request)
        observe[vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS](computed)
        observe[vllm.REQUEST_GENERATION_TOKENS](num_generated)
        observe[vllm.REQUEST_MAX_NUM_GENERATION_TOKENS](num_generated)
        if request.sampling.max_tokens is not None:
            observe[vllm.REQUEST_PARAMS_MAX_TOKENS](request.sampling.max_tokens)


def _trace_id(request: Request) -> str:
    """The id of the request's trace. Empty if it is not sampled."""
    return request.traceparent[3:35]


def _num_cached(request: Request) -> int:
    """Number of cached prompt tokens. A prefix hit can also include earlier output tokens."""
    return min(request.num_cached_tokens or 0, request.num_prompt_tokens)
