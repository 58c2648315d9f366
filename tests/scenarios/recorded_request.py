"""The record of one request of a scenario, in the format of vLLM's recorded decisions."""

from dataclasses import dataclass, field

from services.common.request.finish import CLIENT_ERRORS, FinishReason
from services.scheduler.core.request import Request, TurnEnd
from tests.scenarios.record import Record


@dataclass(slots=True)
class RecordedRequest:
    """A request, the steps that first scheduled and that ended it, and its delivered tokens.

    `turn` is the end of the last completed turn of a session (a request that receives its input in
    turns). `stop_token_id` is the last stop token, which vLLM reports again in later turns of a
    session.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    first_step: int | None = None
    num_cached_tokens: int | None = None
    finish_step: int | None = None
    turn: TurnEnd | None = None
    stop_token_id: int | None = None

    def planned(self, step: int) -> None:
        """Must be called when a step's plan contains the request among its new requests."""
        if self.first_step is None:
            self.first_step, self.num_cached_tokens = step, self.request.num_cached_tokens

    def entry(self) -> Record:
        """The request's entry in the record of a scenario."""
        request = self.request
        end = request.finish_reason or (self.turn and self.turn.finish_reason)
        reason = end and recorded_reason(end)
        return {
            "output_token_ids": self.token_ids,
            "num_preemptions": request.num_preemptions,
            "first_step": self.first_step,
            "cached_tokens": self.num_cached_tokens,
            "finish_step": self.finish_step,
            "finish_reason": reason or ("rejected" if request.is_finished else None),
            "stop_reason": self.stop_token_id,
        }


_ERRORS = {FinishReason.KV_LOAD_FAILED, *CLIENT_ERRORS}


def recorded_reason(reason: FinishReason) -> str:
    """The name of a finish reason in records. Several of our reasons are `error` in vLLM."""
    return "error" if reason in _ERRORS else reason.value
