"""The events of a step log without the scheduler's decisions: the input of a what-if."""

from collections import defaultdict
from dataclasses import dataclass, field

from services.cli.replay.fields import Field
from services.common.errors import InvalidArgument
from services.common.finish_reason import FinishReason
from services.common.ids import RequestKey
from services.common.repetition import RepetitionDetection
from services.common.sampling import SamplingParams
from services.scheduler.core.output import EngineCoreOutputs
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it was added."""

    key: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int
    arrival_time: float
    cache_salt: str
    reads_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that was aborted."""

    key: int
    reason: FinishReason


Event = Arrival | Abort | str
"""A string is the name of a scheduler's method: forget_pool, preempt_all, reset_prefix_cache."""


@dataclass(slots=True)
class Moment:
    """What happened around one step."""

    before_plan: list[Event] = field(default_factory=list)
    before_update: list[Event] = field(default_factory=list)


class History:
    """Events by step, and the tokens of each request.

    The step of an event is the number of steps planned before it. Events between a plan and the
    next update belong to the plan's own step, after it.
    """

    def __init__(self) -> None:
        self.num_plans = 0
        self.moments: dict[int, Moment] = defaultdict(Moment)
        self.requests: dict[int, Request] = {}
        """By key. Their tokens are complete once the log has been read."""
        self.accepted: dict[int, dict[int, int]] = defaultdict(dict)
        """Accepted drafts of a request, by how many tokens it had when they were verified."""
        self._follows_plan = False

    def add_arrival(self, arrival: Arrival, request: Request) -> None:
        """A request was added."""
        self.requests[arrival.key] = request
        self._add(arrival)

    def add_abort(self, request: Request, reason: FinishReason) -> None:
        """A request was ended."""
        self._add(Abort(request.key, reason))

    def add_call(self, name: str) -> None:
        """A method of the scheduler was called that concerns no single request."""
        self._add(name)

    def add_plan(self) -> None:
        """A step was planned."""
        self.num_plans += 1
        self._follows_plan = True

    def add_update(self, update: EngineCoreOutputs) -> None:
        """The scheduler was updated with the tokens of a step."""
        self._follows_plan = False
        if not update.plan.draft_token_ids:
            return
        for news in update:
            num_tokens = news.request.num_tokens - len(news.token_ids)
            self.accepted[news.request.key][num_tokens] = max(0, len(news.token_ids) - 1)

    def _add(self, event: Event) -> None:
        if self._follows_plan:
            self.moments[self.num_plans - 1].before_update.append(event)
        else:
            self.moments[self.num_plans].before_plan.append(event)


def new_request(arrival: Arrival) -> Request:
    """The request as it was when it was added."""
    return Request(
        request_id=arrival.request_id,
        key=RequestKey(arrival.key),
        token_ids=list(arrival.token_ids),
        num_prompt_tokens=arrival.num_prompt_tokens,
        sampling=arrival.sampling,
        priority=arrival.priority,
        arrival_time=arrival.arrival_time,
        cache_salt=arrival.cache_salt,
        reads_prefix_cache=arrival.reads_prefix_cache,
    )


def read_arrival(entry: Field, max_model_len: int) -> Arrival:
    """An entry of `add`. Raises FieldError."""
    tokens = entry["tokens"]
    token_ids = tokens.integers()
    if not 0 < len(token_ids) < max_model_len:
        raise tokens.wrong(f"must hold 1 to {max_model_len - 1} tokens")
    num_prompt_tokens = entry["num_prompt_tokens"].integer(1, len(token_ids))
    num_output_tokens = len(token_ids) - num_prompt_tokens
    return Arrival(
        key=entry["key"].integer(1),
        request_id=entry["id"].text(),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(
            max_tokens=entry["max_tokens"].integer(num_output_tokens + 1),
            eos_token_ids=tuple(entry["eos_token_ids"].integers()),
            stop_token_ids=tuple(entry["stop_token_ids"].integers()),
            repetition_detection=_read_repetition(entry["repetition_detection"]),
            min_tokens=entry["min_tokens"].integer(),
        ),
        priority=entry["priority"].integer(-(2**31)),
        arrival_time=entry["arrival_time"].number(-1e18, 1e18),
        cache_salt=entry["cache_salt"].text(),
        reads_prefix_cache=entry["reads_prefix_cache"].boolean(),
    )


def _read_repetition(entry: Field) -> RepetitionDetection | None:
    if entry.value is None:
        return None
    values = entry.integers()
    if len(values) != 3:
        raise entry.wrong("must be two sizes and a count")
    repetition = RepetitionDetection(*values)
    try:
        repetition.validate()
    except InvalidArgument as error:
        raise entry.wrong(f"must describe a repetition ({error.message})") from None
    return repetition
