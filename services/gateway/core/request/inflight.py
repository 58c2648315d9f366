"""Unfinished sequences (the prompt and one answer of a request) with their generated tokens, and
the mailbox of a request, from which the request's reader takes the output of its sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.request.finish import Finish, append_until_end, ending_token_ids
from services.common.request.sampling import MAX_INT32
from services.gateway.core.request.delta import Delta, Progress
from services.gateway.core.request.logprobs import LogprobRows, joined
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.wait import Wait
from services.gateway.core.routing_decision import RoutingDecision
from services.gateway.core.traces.sequence_trace import ResubmitCause, SequenceTrace

MAX_LOSSES_COMPUTED = 5
"""A sequence fails if more replicas than this number are lost in succession while they compute it.
A new token of the sequence resets the count.
"""
MAX_LOSSES_WAITED = 50
"""A sequence fails if more replicas than this number are lost in succession while it waits in their
queues. The limit is high, since a waiting sequence is unlikely to cause a loss.
"""


@dataclass(slots=True)
class Losses:
    """Counts the replicas that were lost while one sequence was there, since its last new token."""

    computing: bool = False
    """Whether the current replica has scheduled the sequence and has not generated a token yet."""
    num_computed: int = 0
    """Number of losses while the sequence was being computed."""
    num_waited: int = 0
    """Number of losses while the sequence was waiting at the replica."""

    @property
    def are_suspicious(self) -> bool:
        """Whether the sequence may be the cause of the losses."""
        return self.num_computed > MAX_LOSSES_COMPUTED or self.num_waited > MAX_LOSSES_WAITED

    def forget(self) -> None:
        """Resets the counts. Called after a new token."""
        self.computing = False
        self.num_computed = self.num_waited = 0

    def count(self) -> None:
        """Counts the loss of the replica that has the sequence."""
        if self.computing:
            self.num_computed += 1
        else:
            self.num_waited += 1
        self.computing = False


def _nothing() -> None:
    return None


def _ignore(_tool: str) -> None:
    return None


@dataclass(slots=True, eq=False)
class Inflight:
    """An unfinished sequence. A replica can continue it from `request` and `output_token_ids`."""

    request: EngineRequest
    index: int
    """The sequence's index in the client's request."""
    number: int
    """A number that increases in order of arrival."""
    mailbox: "Mailbox"
    output_token_ids: list[int] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    refused_by: set[str] = field(default_factory=set)
    """Addresses of the replicas that have refused the sequence since it last left a replica."""
    was_accepted: bool = False
    """Whether a replica has accepted the sequence before. When the queues of all replicas are full,
    such a sequence waits, and a new sequence is refused.
    """
    num_times_taken_back: int = 0
    """Number of times that the gateway took the sequence back from a replica, because the sequence
    was preempted or the replica could not run steps.
    """
    was_called_invalid: bool = False
    """Whether a replica has refused the sequence as invalid."""
    was_sent: bool = False
    was_stopped: bool = False
    wait_until: float | None = None
    """Time on the event loop's clock at which the current wait for a replica ends with an error."""
    release: Callable[[], None] = _nothing
    """Aborts the sequence at its current replica."""
    end_turn: Callable[[str], None] = _ignore
    """Sends the replica the name of the tool that the client runs after the sequence's end."""
    trace: SequenceTrace = field(init=False)
    _num_prompt_rows: int = 0
    """Number of rows of prompt log-probabilities that were added to deltas."""
    _num_repeated_rows: int = 0
    """Number of rows of prompt log-probabilities to skip, since the replica sends them again."""

    def __post_init__(self) -> None:
        self.trace = SequenceTrace(self.index, self.request.request_id, self.mailbox.nanos)

    @property
    def has_output(self) -> bool:
        """Whether the sequence has tokens or prompt log-probabilities."""
        return bool(self.output_token_ids or self._num_prompt_rows)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the replica must still send log-probabilities of the prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_token_ids

    def resume(self, progress: Progress) -> None:
        """Sets the output that the sequence already had at another gateway."""
        self.output_token_ids = list(progress.token_ids)
        self.was_accepted = bool(progress.token_ids)
        self._num_prompt_rows = progress.num_prompt_rows

    def sent(
        self,
        release: Callable[[], None],
        route: RoutingDecision,
        end_turn: Callable[[str], None] = _ignore,
    ) -> None:
        """Records that the sequence was sent to a replica. `release` aborts the sequence at this
        replica, and `end_turn` sends the replica the name of the tool that runs after the sequence.
        """
        self.release, self.end_turn = release, end_turn
        self.was_sent = True
        self.mailbox.routes.append(route)
        self.trace.sent(route)
        self._num_repeated_rows = self._num_prompt_rows

    def admitted(self, num_cached_tokens: int) -> None:
        """Records that the replica has scheduled the sequence. `num_cached_tokens` is ignored if
        another replica has already generated tokens of the sequence.
        """
        self.was_accepted = True
        self.losses.computing = True
        self.trace.admitted = self.mailbox.nanos()
        if not self.output_token_ids:
            self._delta().num_cached_tokens = num_cached_tokens

    def tokens(self, token_ids: list[int]) -> None:
        """Appends new tokens. The caller must not modify the list afterwards."""
        if not token_ids:
            return
        self.was_accepted = True
        if self.losses.computing:
            self.trace.first_token = self.mailbox.nanos()
        self.losses.forget()
        self.output_token_ids += token_ids
        self.mailbox.add_tokens(self.index, token_ids)

    def lost(self, cause: ResubmitCause) -> None:
        """Records that the gateway has lost the sequence's replica. The sequence's next wait for a
        replica has the full time limit again.
        """
        self.was_accepted = True
        self.wait_until = None
        self.refused_by.clear()
        self.release = _nothing
        if cause is not ResubmitCause.SCHEDULER_DRAINED:
            self.losses.count()
        self.trace.left(cause)

    def taken_back(self, cause: ResubmitCause) -> None:
        """Aborts the sequence at its replica. It continues later or at another replica."""
        self.was_accepted = True
        self.num_times_taken_back += 1
        self.wait_until = None
        self.refused_by.clear()
        self.release()
        self.release = _nothing
        self.losses.computing = False
        self.trace.left(cause)

    def logprobs(self, rows: LogprobRows) -> None:
        delta = self.mailbox.open_delta(self.index)
        delta.logprobs = joined(delta.logprobs, rows)

    def prompt_logprobs(self, rows: LogprobRows) -> None:
        """Adds log-probabilities of the prompt, without rows that an earlier replica has sent."""
        num_repeated = min(self._num_repeated_rows, len(rows))
        self._num_repeated_rows -= num_repeated
        rows = rows.part(num_repeated)
        if not rows:
            return
        self._num_prompt_rows += len(rows)
        delta = self._delta()
        delta.prompt_logprobs = joined(delta.prompt_logprobs, rows)

    def pooled(self, values: bytes) -> None:
        """Adds the prompt's vector (little-endian float32). `finished` must be called next."""
        self.was_accepted = True
        self._delta().pooled = values

    def finished(self, finish: Finish) -> None:
        self.trace.timeline.end("finished")
        self._delta().finish = finish

    def failed(self, error: StepwellError) -> None:
        self.trace.timeline.end("failed")
        self._delta().error = error

    def aborted(self) -> None:
        """Ends the sequence at its replica, since the reader needs no more output."""
        self.release()
        self.trace.timeline.end("aborted")

    def _delta(self) -> Delta:
        return self.mailbox.delta(self.index)


def ended(inflight: Inflight) -> Finish | None:
    """Determines from a sequence's tokens whether and how the sequence has ended, because its
    replica may be lost before it reports the end. Returns None if the sequence has not ended.
    """
    tokens, sampling = inflight.output_token_ids, inflight.request.sampling
    if not tokens:
        return None
    longest = MAX_INT32 if sampling.max_tokens is None else sampling.max_tokens
    ending = ending_token_ids(sampling)
    return append_until_end(tokens[:-1], tokens[-1:], 0, longest, ending, sampling)


class Mailbox:
    """The sequences of one client request, and the output that the reader has not taken yet.

    Each sequence has at most one delta, which collects the new output. So even if the reader stops
    reading, the mailbox needs no more memory than the request's tokens.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        numbers: Iterator[int],
        drop: Callable[[Inflight], None],
        nanos: Callable[[], int],
    ) -> None:
        """`numbers` yields the arrival numbers of sequences. `drop` is called for each aborted
        sequence. `nanos` is the clock of the sequences' timelines, in steady nanoseconds.
        """
        self.nanos = nanos
        self.inflights = [
            Inflight(request, index, next(numbers), self) for index, request in enumerate(requests)
        ]
        self.routes: list[RoutingDecision] = []
        """The routing decisions in order of time, one for each time that a sequence was sent."""
        self.waits: list[Wait] = []
        """The waits, which have ended, of sequences that were not sent at once or were preempted,
        in order of the waits' ends.
        """
        self.traces = [inflight.trace for inflight in self.inflights]
        self._unfinished = set(range(len(requests)))
        self._drop = drop
        self._deltas: dict[int, Delta] = {}
        self._on_news: Callable[[], None] = _nothing
        self._min_tokens = 1
        self._begun: set[int] = set()
        """Indices of the sequences whose first tokens the reader has taken."""

    def delta(self, index: int) -> Delta:
        """Returns the delta to which the caller adds output of a sequence. Notifies the reader."""
        delta = self.open_delta(index)
        self._on_news()
        return delta

    def open_delta(self, index: int) -> Delta:
        """Like `delta`, but does not notify the reader. The caller then adds tokens by
        `add_tokens`, which notifies the reader.
        """
        delta = self._deltas.get(index)
        if delta is None:
            delta = self._deltas[index] = Delta()
        return delta

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        """Adds tokens to the sequence's delta. The caller must not modify the list afterwards."""
        delta = self._deltas.get(index)
        if delta is None:
            delta = self._deltas[index] = Delta(token_ids)
        else:
            delta.token_ids += token_ids
        if len(delta.token_ids) >= self._min_tokens or index not in self._begun:
            self._on_news()

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news` when there is new output. `on_news` must not call `take`. If the new
        output consists of tokens, `on_news` is called for the first tokens of a sequence, and later
        when a delta has at least `min_tokens` tokens.
        """
        self._on_news, self._min_tokens = on_news, min_tokens

    def take(self) -> list[tuple[int, Delta]]:
        """Returns the output since the last call as pairs of a sequence's index and its delta. Each
        index occurs at most once.
        """
        deltas, self._deltas = self._deltas, {}
        for index, delta in deltas.items():
            if delta.token_ids:
                self._begun.add(index)
            if delta.finish is not None or delta.error is not None:
                self._unfinished.discard(index)
        return list(deltas.items())

    def resume(self, progress: Sequence[Progress]) -> list[Inflight]:
        """Sets the output that each sequence already had at another gateway. Returns the unfinished
        sequences.
        """
        going_on = []
        for inflight, one in zip(self.inflights, progress, strict=True):
            inflight.resume(one)
            if one.has_ended:
                self._unfinished.discard(inflight.index)
            elif (finish := ended(inflight)) is not None:
                inflight.finished(finish)
            else:
                going_on.append(inflight)
        return going_on

    def abort(self, index: int) -> None:
        """Ends a sequence because its text contains a stop string. Idempotent."""
        if index in self._unfinished:
            self.inflights[index].was_stopped = True
            self._abort(index)

    def end_turn(self, index: int, tool: str) -> None:
        self.inflights[index].end_turn(tool)

    def close(self) -> None:
        """Aborts the unfinished sequences and drops all references. Idempotent."""
        for index in tuple(self._unfinished):
            self._abort(index)
        self.inflights = []
        self._on_news = _nothing

    def _abort(self, index: int) -> None:
        self._unfinished.discard(index)
        self._drop(self.inflights[index])
