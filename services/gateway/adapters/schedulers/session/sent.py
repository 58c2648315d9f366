"""The sequences that were sent to a scheduler in a session, and the checks of their results."""

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.request.finish import FinishReason, append_until_end, ending_token_ids
from services.common.request.messages import finish_reason_from_proto
from services.common.request.sampling import MAX_INT32
from services.gateway.adapters.schedulers.session.rows import check_rows
from services.gateway.adapters.schedulers.session.wrong_message import WrongMessage, require
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits

_BY_TOKENS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})
"""The finish reasons that the gateway can derive from the tokens."""
_LONGEST_NANOS = 2**62


class Sent:
    """One sequence at the scheduler, with the limits that its results must respect."""

    __slots__ = (
        *(
            "continues",
            "ending",
            "inflight",
            "is_admitted",
            "is_between_turns",
            "is_leaving",
            "max_tokens",
        ),
        *("min_tokens", "num_prompt_rows", "num_prompt_rows_wanted", "repetition", "wants_rows"),
    )

    def __init__(self, inflight: Inflight, *, continues: bool = False) -> None:
        """`continues` is true if the sequence is a turn of a client's session after the first."""
        self.continues = continues
        sampling = inflight.request.sampling
        self.inflight = inflight
        self.is_admitted = False
        self.is_leaving = False
        """Whether the gateway has sent an abort of the sequence."""
        self.is_between_turns = False
        self.max_tokens = MAX_INT32 if sampling.max_tokens is None else sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        self.ending = ending_token_ids(sampling)
        self.repetition = sampling.repetition_detection
        self.wants_rows = sampling.logprobs is not None
        num_rows = len(inflight.request.prompt_token_ids) - 1
        self.num_prompt_rows_wanted = num_rows if inflight.wants_prompt_logprobs else 0
        self.num_prompt_rows = 0
        """Number of rows of prompt log-probabilities that were received in this session."""

    @property
    def needs_more(self) -> bool:
        """Whether more than the count of tokens and the stop tokens must be checked."""
        return self.is_leaving or self.wants_rows or self.repetition is not None

    def check_admitted(self, num_cached_tokens: int) -> None:
        """Raises WrongMessage if the report of the sequence's first scheduling is invalid."""
        require(not self.is_admitted, "a request is admitted twice")
        inflight = self.inflight
        num_tokens = len(inflight.request.prompt_token_ids) + len(inflight.output_token_ids)
        require(
            num_cached_tokens <= num_tokens,
            f"{num_cached_tokens} of {num_tokens} tokens are cached",
        )

    def check_tokens(self, token_ids: list[int], num_output: int, *, has_ended: bool) -> None:
        """Checks new tokens. `num_output` must be the number of output tokens including the new
        tokens. `has_ended` is true if the same message ends the sequence.
        """
        output = self.inflight.output_token_ids
        if len(output) + len(token_ids) != num_output:
            received = f"{len(output)} and now {len(token_ids)}"
            raise WrongMessage(f"a request has {num_output} tokens, but {received} were received")
        if num_output > self.max_tokens:
            raise WrongMessage(
                f"a request has {num_output} output tokens, but max_tokens is {self.max_tokens}"
            )
        if not self.is_admitted:
            raise WrongMessage("tokens are sent for a request that was not admitted")
        if not token_ids:
            return
        if len(token_ids) > 1 and not self.ending.isdisjoint(token_ids[:-1]):
            num_kept = num_output - len(token_ids)
            for number, token_id in enumerate(token_ids[:-1], num_kept + 1):
                goes_on = token_id not in self.ending or number < self.min_tokens
                require(goes_on, "tokens follow the stop token of a request")
        if has_ended:
            return
        is_last = num_output >= self.max_tokens
        if num_output >= self.min_tokens:
            is_last |= token_ids[-1] in self.ending
            if self.repetition is not None:
                num_seen = self.repetition.max_pattern_size * self.repetition.min_count
                is_last |= self.repetition.found_at_end([*output[-num_seen:], *token_ids], 0)
        if is_last:
            raise WrongMessage("the last token of a request is sent without the request's end")

    def check_end(
        self, message: scheduler_pb2.Finished, token_ids: list[int], limits: ModelLimits
    ) -> None:
        """Checks the end of the sequence or of its turn. `token_ids` are the sequence's new tokens
        in the same message.
        """
        reason = finish_reason_from_proto(message.reason)
        require(reason is not None, f"finish reason {message.reason} is not known")
        _check_times(message.times)
        if reason not in _BY_TOKENS:
            require(
                not message.HasField("stop_token_id"),
                f"a request with finish reason {reason} has a stop token",
            )
        elif not (self.is_leaving or self.is_between_turns or self.inflight.request.pooling):
            self._check_reason(message, reason, token_ids, limits)

    def _check_reason(
        self,
        message: scheduler_pb2.Finished,
        reason: FinishReason | None,
        token_ids: list[int],
        limits: ModelLimits,
    ) -> None:
        tokens = [*self.inflight.output_token_ids, *token_ids]
        require(bool(tokens), "a request ended without an output token")
        num_prompt, last = len(self.inflight.request.prompt_token_ids), tokens.pop()
        longest = min(self.max_tokens, limits.capacity - num_prompt)
        sampling = self.inflight.request.sampling
        end = append_until_end(tokens, [last], 0, longest, self.ending, sampling)
        require(
            end is not None,
            f"a request ended with finish reason {reason}, but its tokens show no end",
        )
        assert end is not None
        stop = message.stop_token_id if message.HasField("stop_token_id") else None
        is_same = (end.reason, end.stop_token_id) == (reason, stop)
        require(
            is_same,
            f"a request ended with {reason}, token {stop}, not {end.reason}, {end.stop_token_id}",
        )

    def check_prompt_rows(self, rows: common_pb2.Logprobs, vocab_size: int) -> None:
        request, start = self.inflight.request, self.num_prompt_rows
        num_rows = len(rows.ranks)
        is_wanted = start + num_rows <= self.num_prompt_rows_wanted
        require(
            is_wanted,
            f"a prompt has {start + num_rows} rows of log-probabilities, "
            f"not {self.num_prompt_rows_wanted}",
        )
        tokens = request.prompt_token_ids[start + 1 : start + 1 + num_rows]
        check_rows(rows, tokens, request.sampling.prompt_logprobs or 0, vocab_size)


def _check_times(times: scheduler_pb2.RequestTimes) -> None:
    longest = max(
        times.queue_nanos,
        times.prefill_nanos,
        times.decode_nanos,
        times.interrupted_nanos,
        times.queued_unix_nanos,
    )
    require(longest < _LONGEST_NANOS, f"a time of {longest} ns in a request is impossible")
