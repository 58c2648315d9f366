"""News of one sequence, in the engine's terms."""

import enum
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.gateway.core.logprobs import LogprobRows


class FinishReason(enum.Enum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"
    """The answer went round in circles; vLLM's word."""


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
