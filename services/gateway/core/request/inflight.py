"""Sequences that have not ended, with their tokens so far, and the mailbox of their reader."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.request.finish import Finish, append_until_end, ending_token_ids
from services.common.request.sampling import MAX_INT32
from services.gateway.core.admission.wait import Wait
from services.gateway.core.fleet.route import Route
from services.gateway.core.fleet.sequence_trace import ResubmitCause, SequenceTrace
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.logprobs import LogprobRows, joined
from services.gateway.core.request.progress import Progress
from services.gateway.core.request.request import EngineRequest

MAX_LOSSES_COMPUTED = 5
"""Replicas that may be lost while they compute a sequence, without a token from it."""
MAX_LOSSES_WAITED = 50
"""The same for replicas at whose queue it waits: it is hardly the cause of these losses."""


@dataclass(slots=True)
class Losses:
    """Replicas that were lost under a sequence since its last token."""

    computing: bool = False
    """Whether it was scheduled by the replica that has it, and got no token there yet."""
    num_computed: int = 0
    """Losses while it was computed."""
    num_waited: int = 0
    """Losses while it waited there."""

    @property
    def are_suspicious(self) -> bool:
        """Whether the sequence may be their cause: losses while it only waited count less."""
        return self.num_computed > MAX_LOSSES_COMPUTED or self.num_waited > MAX_LOSSES_WAITED

    def forget(self) -> None:
        """Starts over, since a token came."""
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


@dataclass(slots=True, eq=False)
class Inflight:
    """One sequence that has not ended: its request and all its tokens so far, which is all that a
    replica needs to go on with it.
    """

    request: EngineRequest
    index: int
    """Its place among the sequences of its client's request."""
    number: int
    """Grows in the order of arrival."""
    mailbox: "Mailbox"
    output_token_ids: list[int] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    refused_by: set[str] = field(default_factory=set)
    """Addresses of the replicas that refused it."""
    was_accepted: bool = False
    """Whether a replica has taken it: from then on it waits where it would be refused before."""
    num_times_taken_back: int = 0
    """How often it was preempted, or left a replica that could not run steps."""
    was_called_invalid: bool = False
    """Whether a replica refused it as invalid."""
    was_sent: bool = False
    """Whether it was sent to a replica, at least once."""
    was_stopped: bool = False
    """Whether a stop string ended it."""
    wait_until: float | None = None
    """When its present wait for a replica ends, on the event loop's clock; None if it waits for
    none.
    """
    release: Callable[[], None] = _nothing
    """Aborts it at the replica that has it."""
    trace: SequenceTrace = field(init=False)
    _num_prompt_rows: int = 0
    """Log-probabilities of its prompt that were delivered."""
    _num_repeated_rows: int = 0
    """The part of these that its present replica sends again."""

    def __post_init__(self) -> None:
        self.trace = SequenceTrace(self.index, self.request.request_id, self.mailbox.nanos)

    @property
    def has_output(self) -> bool:
        """Whether anything that depends on the model was delivered."""
        return bool(self.output_token_ids or self._num_prompt_rows)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.request.sampling.prompt_logprobs is not None and not self.output_token_ids

    def resume(self, progress: Progress) -> None:
        """Takes over the output that the sequence has from elsewhere."""
        self.output_token_ids = list(progress.token_ids)
        self.was_accepted = bool(progress.token_ids)
        self._num_prompt_rows = progress.num_prompt_rows

    def sent(self, release: Callable[[], None], route: Route) -> None:
        """Notes that the sequence was sent to a replica, where `release` aborts it. It sends all
        log-probabilities of the prompt, also those that were delivered.
        """
        self.release = release
        self.was_sent = True
        self.mailbox.routes.append(route)
        self.trace.sent(route)
        self._num_repeated_rows = self._num_prompt_rows

    def admitted(self, num_cached_tokens: int) -> None:
        """Notes that the sequence was scheduled. Of its cached tokens only the first number is
        delivered: later ones follow a loss.
        """
        self.was_accepted = True
        self.losses.computing = True
        self.trace.admitted = self.mailbox.nanos()
        if not self.output_token_ids:
            self._delta().num_cached_tokens = num_cached_tokens

    def tokens(self, token_ids: list[int]) -> None:
        """Appends new tokens. The list is kept, and must not be used for anything else."""
        if not token_ids:
            return
        self.was_accepted = True
        if self.losses.computing:
            self.trace.first_token = self.mailbox.nanos()
        self.losses.forget()
        self.output_token_ids += token_ids
        self.mailbox.add_tokens(self.index, token_ids)

    def lost(self, cause: ResubmitCause) -> None:
        """Notes that the session of its replica ended. The next wait for a replica may last as long
        as the first.
        """
        self.was_accepted = True
        self.wait_until = None
        self.release = _nothing
        if cause is not ResubmitCause.SCHEDULER_DRAINED:
            self.losses.count()
        self.trace.left(cause)

    def taken_back(self, cause: ResubmitCause) -> None:
        """Aborts the sequence at its replica; it goes on later, or at another replica."""
        self.was_accepted = True
        self.num_times_taken_back += 1
        self.wait_until = None
        self.release()
        self.release = _nothing
        self.losses.computing = False
        self.trace.left(cause)

    def logprobs(self, rows: LogprobRows) -> None:
        """Adds log-probabilities of the tokens that came last."""
        delta = self.mailbox.open_delta(self.index)
        delta.logprobs = joined(delta.logprobs, rows)

    def prompt_logprobs(self, rows: LogprobRows) -> None:
        """Adds log-probabilities of the prompt, but for those that were delivered before."""
        num_repeated = min(self._num_repeated_rows, len(rows))
        self._num_repeated_rows -= num_repeated
        rows = rows.part(num_repeated)
        if not rows:
            return
        self._num_prompt_rows += len(rows)
        delta = self._delta()
        delta.prompt_logprobs = joined(delta.prompt_logprobs, rows)

    def pooled(self, values: bytes) -> None:
        """Adds the vector of the prompt; `finished` follows."""
        self.was_accepted = True
        self._delta().pooled = values

    def finished(self, finish: Finish) -> None:
        """Ends the sequence."""
        self.trace.timeline.end("finished")
        self._delta().finish = finish

    def failed(self, error: StepwellError) -> None:
        """Ends the sequence with an error, which its reader gets."""
        self.trace.timeline.end("failed")
        self._delta().error = error

    def aborted(self) -> None:
        """Ends the sequence at its replica, since its reader wants no more of it."""
        self.release()
        self.trace.timeline.end("aborted")

    def _delta(self) -> Delta:
        return self.mailbox.delta(self.index)


def ended(inflight: Inflight) -> Finish | None:
    """How the sequence ends by the tokens that came; None if it goes on. For a sequence whose end
    was lost with its replica.
    """
    tokens, sampling = inflight.output_token_ids, inflight.request.sampling
    if not tokens:
        return None
    longest = MAX_INT32 if sampling.max_tokens is None else sampling.max_tokens
    ending = ending_token_ids(sampling)
    return append_until_end(tokens[:-1], tokens[-1:], 0, longest, ending, sampling)


class Mailbox:
    """The sequences of one client request, and their output since it was read last.

    It holds at most one delta per sequence, so a reader that has stopped costs no more than the
    tokens of its own request.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        numbers: Iterator[int],
        drop: Callable[[Inflight], None],
        nanos: Callable[[], int],
    ) -> None:
        """`numbers` counts sequences in order of arrival. `drop` is called for each aborted one.
        `nanos` is a steady clock, for their timelines.
        """
        self.nanos = nanos
        self.inflights = [
            Inflight(request, index, next(numbers), self) for index, request in enumerate(requests)
        ]
        self.routes: list[Route] = []
        """Where its sequences were sent, in order; one that was sent again has several."""
        self.waits: list[Wait] = []
        """The waits of its sequences that did not go to a replica at once, or were preempted, in
        the order in which they ended.
        """
        self.traces = [inflight.trace for inflight in self.inflights]
        """Where each sequence was."""
        self._unfinished = set(range(len(requests)))
        self._drop = drop
        self._deltas: dict[int, Delta] = {}
        self._on_news: Callable[[], None] = _nothing
        self._min_tokens = 1
        self._begun: set[int] = set()
        """Sequences of which tokens were taken."""

    def delta(self, index: int) -> Delta:
        """The delta to add to; calls `on_news` of its reader."""
        delta = self.open_delta(index)
        self._on_news()
        return delta

    def open_delta(self, index: int) -> Delta:
        """The delta to add to, without a call of `on_news`: another addition makes it."""
        delta = self._deltas.get(index)
        if delta is None:
            delta = self._deltas[index] = Delta()
        return delta

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        """Adds tokens to the delta, which keeps the list if they are its first."""
        delta = self._deltas.get(index)
        if delta is None:
            delta = self._deltas[index] = Delta(token_ids)
        else:
            delta.token_ids += token_ids
        if len(delta.token_ids) >= self._min_tokens or index not in self._begun:
            self._on_news()

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news` whenever something is added to a delta; it must not take the delta in
        that call. For tokens alone it is called with the first ones of a sequence, and then each
        time that `min_tokens` or more have come.
        """
        self._on_news, self._min_tokens = on_news, min_tokens

    def take(self) -> list[tuple[int, Delta]]:
        """The output since the last call: (index of the sequence, its delta), each index at most
        once.
        """
        deltas, self._deltas = self._deltas, {}
        for index, delta in deltas.items():
            if delta.token_ids:
                self._begun.add(index)
            if delta.finish is not None or delta.error is not None:
                self._unfinished.discard(index)
        return list(deltas.items())

    def resume(self, progress: Sequence[Progress]) -> list[Inflight]:
        """Lets sequences go on from there; returns those that have not ended."""
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
        """Ends a sequence whose text is complete; later deltas of it are dropped. Idempotent."""
        if index in self._unfinished:
            self.inflights[index].was_stopped = True
            self._abort(index)

    def close(self) -> None:
        """Aborts the sequences that have not ended, and lets go of all. Idempotent."""
        for index in tuple(self._unfinished):
            self._abort(index)
        self.inflights = []
        self._on_news = _nothing

    def _abort(self, index: int) -> None:
        self._unfinished.discard(index)
        self._drop(self.inflights[index])
