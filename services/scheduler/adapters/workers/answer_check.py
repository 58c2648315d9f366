"""Checks the workers' responses against the steps that were sent, before the engine uses them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan

from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.request.pooling import Pooler
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request

LONGEST_NANOS = 86_400 * 10**9
"""One day in nanoseconds. A response is rejected if it reports a longer time."""
_LARGEST_LOGPROB = 1e-3
"""Limit on a log-probability in a response: 0 plus rounding errors."""
_FLOAT_BYTES = 4


class WrongAnswer(ValueError):
    """A response contradicts its step. The message names the field and the contradiction."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model that responses must agree with."""

    vocab_size: int = 0
    pooler: Pooler | None = None
    """How the model computes a vector from a prompt. None if the model samples tokens."""


class ExpectedAnswer:
    """What a valid response to a step may contain. Created when the step is sent."""

    __slots__ = ("_logprobs", "_model", "_plan")

    def __init__(
        self, plan: SchedulerOutput, model: ModelFacts, with_logprobs: "RequestsWithLogprobs"
    ) -> None:
        self._plan = plan
        self._model = model
        has_any = plan.block_tables or with_logprobs.requests
        self._logprobs = with_logprobs.in_step(plan) if has_any else {}

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens for which the step computes log-probabilities."""
        wanted = self._logprobs.values()
        return sum(one.num_prompt_rows for one in wanted if one.num_prompt is not None)

    def check(
        self, output: ModelRunnerOutput, num_tokens: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Raises WrongAnswer if the output contradicts the step. `token_ids` are the tokens of all
        requests, one request after another. `num_tokens` has the number of tokens of each request.
        """
        plan = self._plan
        count = len(plan.requests)
        if len(num_tokens) != count:
            raise WrongAnswer(f"num_tokens: has {len(num_tokens)} values for {count} requests")
        if self._model.pooler is not None:
            _require(
                not (any(num_tokens) or token_ids),
                "token_ids",
                "must be empty, because the model computes vectors",
            )
            self._check_pooled(output, self._model.pooler)
            count = 0
        elif plan.prefill_chunks or output.num_draft_tokens or num_tokens.count(1) != count:
            self._check_counts(num_tokens, output.num_draft_tokens)
            count = sum(num_tokens)
        self._check_token_ids(count, token_ids)
        if self._logprobs or output.logprobs:
            self._check_logprobs(output, num_tokens)
        if output.nan_requests or output.refused_tokens or output.grammar_errors:
            self._check_failures(output, num_tokens)

    def _check_failures(self, output: ModelRunnerOutput, num_tokens: Sequence[int]) -> None:
        last = len(self._plan.requests) - 1
        for name in ("nan_requests", "refused_tokens", "grammar_errors"):
            if indexes := getattr(output, name):
                _require(
                    0 <= min(indexes) <= max(indexes) <= last,
                    name,
                    "an index is not that of a request of the step",
                )
        for index, place in output.refused_tokens.items():
            _require(
                0 <= place <= num_tokens[index],
                "refused_tokens",
                f"has token {place} of a request with {num_tokens[index]} tokens",
            )

    def _check_counts(self, num_tokens: Sequence[int], num_drafts: Sequence[int]) -> None:
        """Raises WrongAnswer if a request has a wrong number of tokens. With a complete prompt, it
        has one token, and may have one more for each verified draft. Otherwise it has none.
        """
        plan = self._plan
        given = num_drafts or [0] * len(num_tokens)
        _require(
            len(given) == len(num_tokens),
            "num_draft_tokens",
            f"has values of {len(given)} requests, not {len(num_tokens)}",
        )
        for request, count, verified in zip(plan.requests, num_tokens, given, strict=True):
            planned = len(plan.draft_token_ids.get(request, ()))
            problem = f"is {verified} for a request with {planned} drafts"
            _require(0 <= verified <= planned, "num_draft_tokens", problem)
            least = most = 0
            if request not in plan.prefill_chunks:
                least, most = 1, 1 + verified
            _require(
                least <= count <= most,
                "num_tokens",
                f"is {count} for a request that must have {least} to {most}",
            )

    def _check_token_ids(self, count: int, token_ids: Sequence[int]) -> None:
        if len(token_ids) != count:
            raise WrongAnswer(f"token_ids: has {len(token_ids)} tokens, not {count}")
        if not token_ids:
            return
        smallest, largest, size = min(token_ids), max(token_ids), self._model.vocab_size
        if smallest < 0 or largest >= size:
            wrong = smallest if smallest < 0 else largest
            raise WrongAnswer(f"token_ids: {wrong} is not from 0 to {size - 1}")

    def _check_pooled(self, output: ModelRunnerOutput, pooler: Pooler) -> None:
        plan = self._plan
        ended = {
            index: request
            for index, request in enumerate(plan.requests)
            if request not in plan.prefill_chunks
        }
        found = output.pooled.keys() | output.nan_requests
        _require(
            found == ended.keys(),
            "pooled",
            f"has vectors of other prompts ({len(found)}) than the step completes ({len(ended)})",
        )
        for index, values in output.pooled.items():
            params = ended[index].pooling
            size = params.dimensions if params is not None and params.dimensions else pooler.size
            given = len(values)  # type: ignore[arg-type]  # bytes, opaque to the core
            _require(
                given == _FLOAT_BYTES * size,
                "pooled.values",
                f"a vector has {given} bytes, not those of {size} numbers",
            )

    def _check_logprobs(self, output: ModelRunnerOutput, num_tokens: Sequence[int]) -> None:
        unasked = output.logprobs.keys() - self._logprobs.keys()
        _require(
            not unasked, "logprobs", "has log-probabilities of a request that did not ask for them"
        )
        nothing = worker_pb2.RequestLogprobs()
        for index, wanted in self._logprobs.items():
            found = output.logprobs.get(index, nothing)
            if not isinstance(found, worker_pb2.RequestLogprobs):
                raise AssertionError("log-probabilities are carried through as they came")
            _check_rows(found.sampled, wanted.num_sampled, num_tokens[index], self._model)
            _check_rows(found.prompt, wanted.num_prompt, wanted.num_prompt_rows, self._model)
            if index not in output.nan_requests:
                values = found.sampled.logprobs
                is_number = not isnan(sum(values)) and max(values, default=0.0) < _LARGEST_LOGPROB
                _require(is_number, "logprobs", "has a value that is not a log-probability")


@dataclass(frozen=True, slots=True)
class _WantedLogprobs:
    """The log-probabilities that a request needs in a step."""

    num_sampled: int | None
    """Number of alternatives to each sampled token. None if log-probabilities are not needed."""
    num_prompt: int | None
    """Number of alternatives to each prompt token. None if log-probabilities are not needed."""
    num_prompt_rows: int
    """Number of prompt tokens for which the step computes log-probabilities."""


class RequestsWithLogprobs:
    """The requests in the workers' batch that need log-probabilities."""

    def __init__(self) -> None:
        self.requests: set[Request] = set()

    def in_step(self, plan: SchedulerOutput) -> Mapping[int, _WantedLogprobs]:
        """Maps indexes of requests in the step to the log-probabilities that they need."""
        for request in plan.block_tables:
            sampling = request.sampling
            if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                self.requests.add(request)
        if not self.requests:
            return {}
        self.requests = {request for request in self.requests if request.row is not None}
        return {
            index: _WantedLogprobs(
                request.sampling.logprobs,
                request.sampling.prompt_logprobs,
                max(min(start + num_scheduled, request.num_prompt_tokens - 1) - start, 0),
            )
            for index, (request, start, num_scheduled) in enumerate(
                zip(plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
            )
            if request in self.requests
        }


def _check_rows(
    rows: common_pb2.Logprobs, num_wanted: int | None, num_rows: int, model: ModelFacts
) -> None:
    if num_wanted is None:
        num_rows = 0
    given = len(rows.ranks)
    _require(
        given == num_rows, "logprobs.ranks", f"has {given} rows for a request that needs {num_rows}"
    )
    width = 1 + (num_wanted or 0) if num_rows else 0
    count = width * num_rows
    is_matrix = len(rows.token_ids) == len(rows.logprobs) == count
    _require(
        is_matrix and (rows.width == width or not num_rows),
        "logprobs",
        "has another number of values than rows times width",
    )
    largest = max(chain(rows.token_ids, (rank - 1 for rank in rows.ranks)), default=0)
    _require(
        largest < max(model.vocab_size, 1), "logprobs.token_ids", f"a token or rank is {largest}"
    )


def _require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise WrongAnswer(f"{field}: {problem}")
