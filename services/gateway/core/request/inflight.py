"""Unfinished sequences with the tokens that they have generated, and the mailbox from which a
reader takes their output.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.request.finish import Finish, append_until_end, ending_token_ids
from services.common.request.sampling import MAX_INT32
from services.gateway.core.fleet.routing_decision import RoutingDecision
from services.gateway.core.fleet.sequence_trace import ResubmitCause, SequenceTrace
from services.gateway.core.request.delta import Delta, Progress
from services.gateway.core.request.logprobs import LogprobRows, joined
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.wait import Wait

MAX_LOSSES_COMPUTED = 5
"""Limit on the number of replicas that may be lost in succession while they compute a sequence. A
new token resets the count.
"""
MAX_LOSSES_WAITED = 50
"""Limit on the number of replicas that may be lost in succession while a sequence waits in their
queue. A waiting sequence is unlikely to cause a loss.
"""


@dataclass(slots=True)
class Losses:
    """Counts the replicas that were lost while they had a certain sequence, since its last new
    token.
    """

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
        """Resets the counts after a new token."""
        self.computing = False
        self.num_computed = self.num_waited = 0

    def count(self) -> None:
        """Counts the loss of the sequence's replica."""
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
    """One unfinished sequence. A replica can continue the sequence from its request and its tokens
    so far.
    """

    request: EngineRequest
    index: int
    """The sequence's index in the client's request."""
    number: int
    """The arrival number. A sequence that arrived later has a higher number."""
    mailbox: "Mailbox"
    output_token_ids: list[int] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    refused_by: set[str] = field(default_factory=set)
    """Addresses of the replicas that refused the sequence since it last left a replica."""
    was_accepted: bool = False
    """Whether a replica has accepted the sequence. If true, the sequence waits if all queues are
    full. A new request would be refused.
    """
    num_times_taken_back: int = 0
    """Number of times that the sequence was preempted or taken back from a replica that could not
    run steps.
    """
    was_called_invalid: bool = False
    """Whether a replica has refused the sequence as invalid."""
    was_sent: bool = False
    """Whether the sequence was sent to a replica at least once."""
    was_stopped: bool = False
    """Whether a stop string ended the sequence."""
    wait_until: float | None = None
    """Time on the event loop's clock at which the current wait for a replica ends with an error."""
    release: Callable[[], None] = _nothing
    """Aborts the sequence at its replica."""
    end_turn: Callable[[str], None] = _ignore
    """Tells the replica which tool runs after the sequence has ended there."""
    trace: SequenceTrace = field(init=False)
    _num_prompt_rows: int = 0
    """Number of rows of prompt log-probabilities that were delivered."""
    _num_repeated_rows: int = 0
    """Number of delivered rows of prompt log-probabilities that the current replica will send
    again.
    """

    def __post_init__(self) -> None:
        self.trace = SequenceTrace(self.index, self.request.request_id, self.mailbox.nanos)

    @property
    def has_output(self) -> bool:
        """Whether any model output was delivered."""
        return bool(self.output_token_ids or self._num_prompt_rows)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still expected."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_token_ids

    def resume(self, progress: Progress) -> None:
        """Sets the output of the sequence to earlier output from which it is resumed."""
        self.output_token_ids = list(progress.token_ids)
        self.was_accepted = bool(progress.token_ids)
        self._num_prompt_rows = progress.num_prompt_rows

    def sent(
        self,
        release: Callable[[], None],
        route: RoutingDecision,
        end_turn: Callable[[str], None] = _ignore,
    ) -> None:
        """Records that the sequence was sent to a replica. `release` aborts the sequence there, and
        `end_turn` sends the tool that runs after it. The replica sends all log-probabilities of the
        prompt, including those already delivered.
        """
        self.release, self.end_turn = release, end_turn
        self.was_sent = True
        self.mailbox.routes.append(route)
        self.trace.sent(route)
        self._num_repeated_rows = self._num_prompt_rows

    def admitted(self, num_cached_tokens: int) -> None:
        """Records that the sequence was scheduled. `num_cached_tokens` is delivered only if there
        is no output yet. Later numbers are from another replica, after a loss.
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
        """Records that the session with the replica ended. The sequence's next wait for a replica
        has the full time limit.
        """
        self.was_accepted = True
        self.wait_until = None
        self.refused_by.clear()
        self.release = _nothing
        if cause is not ResubmitCause.SCHEDULER_DRAINED:
            self.losses.count()
        self.trace.left(cause)

    def taken_back(self, cause: ResubmitCause) -> None:
        """Aborts the sequence at its replica. It will be continued later or at another replica."""
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
        """Adds log-probabilities of the prompt. Rows that were delivered before are skipped."""
        num_repeated = min(self._num_repeated_rows, len(rows))
        self._num_repeated_rows -= num_repeated
        rows = rows.part(num_repeated)
        if not rows:
            return
        self._num_prompt_rows += len(rows)
        delta = self._delta()
        delta.prompt_logprobs = joined(delta.prompt_logprobs, rows)

    def pooled(self, values: bytes) -> None:
        """Adds the vector of the prompt. A call of `finished` follows."""
        self.was_accepted = True
        self._delta().pooled = values

    def finished(self, finish: Finish) -> None:
        self.trace.timeline.end("finished")
        self._delta().finish = finish

    def failed(self, error: StepwellError) -> None:
        """Ends the sequence with an error, which is delivered to its reader."""
        self.trace.timeline.end("failed")
        self._delta().error = error

    def aborted(self) -> None:
        """Ends the sequence at its replica, since its reader needs no more output."""
        self.release()
        self.trace.timeline.end("aborted")

    def _delta(self) -> Delta:
        return self.mailbox.delta(self.index)


def ended(inflight: Inflight) -> Finish | None:
    """Determines from a sequence's tokens how it ended. Returns None if the sequence has not ended.
    Used if a replica was lost before it reported the end.
    """
    tokens, sampling = inflight.output_token_ids, inflight.request.sampling
    if not tokens:
        return None
    longest = MAX_INT32 if sampling.max_tokens is None else sampling.max_tokens
    ending = ending_token_ids(sampling)
    return append_until_end(tokens[:-1], tokens[-1:], 0, longest, ending, sampling)


class Mailbox:
    """The sequences of one client request, and their output since it was last read.

    There is at most one delta per sequence, so a reader that stops reading costs only the memory of
    its request's tokens.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        numbers: Iterator[int],
        drop: Callable[[Inflight], None],
        nanos: Callable[[], int],
    ) -> None:
        """`numbers` yields the arrival numbers of sequences. `drop` is called for each aborted
        sequence. `nanos` returns the time of the timelines, in nanoseconds on a steady clock.
        """
        self.nanos = nanos
        self.inflights = [
            Inflight(request, index, next(numbers), self) for index, request in enumerate(requests)
        ]
        self.routes: list[RoutingDecision] = []
        """The routes of the sequences, in the order in which they were sent. A sequence that was
        sent several times has several routes.
        """
        self.waits: list[Wait] = []
        """The waits of sequences that were not sent to a replica at once or were preempted, in the
        order in which the waits ended.
        """
        self.traces = [inflight.trace for inflight in self.inflights]
        """The trace of each sequence."""
        self._unfinished = set(range(len(requests)))
        self._drop = drop
        self._deltas: dict[int, Delta] = {}
        self._on_news: Callable[[], None] = _nothing
        self._min_tokens = 1
        self._begun: set[int] = set()
        """Indices of the sequences whose first tokens were taken."""

    def delta(self, index: int) -> Delta:
        """Returns the sequence's current delta, to which the caller adds output. Notifies the
        reader.
        """
        delta = self.open_delta(index)
        self._on_news()
        return delta

    def open_delta(self, index: int) -> Delta:
        """Returns the sequence's current delta, to which the caller adds output. Does not notify
        the reader, since a later addition will.
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
        """Calls `on_news` after additions to a delta. The callback must not take the delta. If only
        tokens are added, it is called for a sequence's first tokens, and then whenever a delta has
        at least `min_tokens` tokens.
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
        """Resumes the sequences from their progress. Returns the unfinished sequences."""
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
        """Ends a sequence because a stop string completed its text. Later output is dropped.
        Idempotent.
        """
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
