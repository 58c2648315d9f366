"""News of one sequence, in the engine's terms."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.finish_reason import FinishReason
from services.gateway.core.logprobs import LogprobRows


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence; `stop_token_id` where one of the client's stop tokens ended it."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True)
class Delta:
    """What came for one sequence since the last look; merged until somebody looks.

    `num_cached_tokens` is set when the sequence left the queue, `error` when it ended badly:
    then nothing follows and `finish` is None.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    num_cached_tokens: int | None = None
    finish: Finish | None = None
    error: StepwellError | None = None

    def cut(self, max_tokens: int) -> "Iterator[Delta]":
        """The same news as deltas of at most so many tokens each; only the last ends anything."""
        token_ids, rows = self.token_ids, self.logprobs
        if len(token_ids) <= max_tokens:
            yield self
            return
        first = Delta(
            token_ids[:max_tokens],
            rows.head(max_tokens) if rows is not None else None,
            self.prompt_logprobs,
            self.num_cached_tokens,
        )
        yield first
        for start in range(max_tokens, len(token_ids), max_tokens):
            part = token_ids[start : start + max_tokens]
            delta = Delta(part)
            if rows is not None:
                delta.logprobs = rows.after(start).head(len(part))
            if start + max_tokens >= len(token_ids):
                delta.finish, delta.error = self.finish, self.error
            yield delta
