"""A client's request from start to end: its sequences at the engine (all replicas together), and
its growing answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.request.program import MAX_KEEP_SECONDS, joined_tools
from services.gateway.core.ports import Tokenizer
from services.gateway.core.request.choice import Choice, Piece
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.engine import DeltaSource, KeptSource, Source
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.logprobs import LogprobRows, joined
from services.gateway.core.request.request import ClientRequest, EngineRequest
from services.gateway.core.text.parsing.events import ParsedMessage
from services.gateway.core.text.stop_strings import StopPatterns


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request. Each prompt is counted once, even if it has several answers.
    Answers that are not returned to the client are counted, too.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_reasoning_tokens: int | None = None
    """Number of generated tokens that are reasoning. It is None if reasoning is not parsed."""
    is_wish_clipped: bool = False
    """Whether the client asked to keep the request's KV blocks for longer than MAX_KEEP_SECONDS."""


class Generation:
    """A checked request with the state of its answers.

    `request.num_candidates` answers are generated for each prompt. Answer i belongs to the prompt
    with index i // num_candidates.
    """

    def __init__(
        self,
        request: ClientRequest,
        identity: Identity,
        sequences: list[EngineRequest],
        tokenizer: Tokenizer,
    ) -> None:
        """`sequences` has one sequence for each answer, and must have been made with `identity`."""
        self.request = request
        self.identity = identity
        self.sequences = sequences
        stops = StopPatterns(request.stop)
        self.mailbox: DeltaSource | None = None
        """The output of the sequences at the engine. It is None before `start` is called."""
        self.source: KeptSource | None = None
        """The source of an answer that all requests with the same idempotency key share. It is None
        if this request shares no answer, and uses the engine directly.
        """
        self.is_replay = False
        """Whether another request started the shared answer."""
        self.num_resumed_tokens = 0
        """Number of generated tokens of an earlier request's stopped answer, if this request
        continues it.
        """
        self.was_taken = False
        """Whether a replica has scheduled any sequence of the request."""
        self.choices = [
            Choice(index, tokenizer, request, sequence, stops)
            for index, sequence in enumerate(sequences)
        ]
        self.num_open = len(self.choices)

    def start(self, engine: Source) -> DeltaSource:
        """Starts the sequences at an engine, or starts to read an answer that another request with
        the same idempotency key has started.
        """
        if self.request.turn is not None:
            self.request.turn.begin()
        self.mailbox = engine.start(self.sequences)
        return self.mailbox

    def accept(self, deltas: Sequence[tuple[int, Delta]]) -> list[Piece]:
        """Converts deltas, each with its sequence's index, to pieces of the answers. Deltas of
        ended answers are ignored. Raises StepwellError if the engine refused the request or failed.
        """
        choices = self.choices
        added = [
            self._accept(index, delta)
            for index, delta in deltas
            if choices[index].finish_reason is None
        ]
        for piece in added:
            if piece.finish_reason is not None:
                self.num_open -= 1
        return added

    def close(self, unread: Sequence[tuple[int, Delta]] = ()) -> None:
        """Aborts unfinished sequences. If the answer is not shared, generated tokens that were not
        read are added to the usage: the tokens in the mailbox, and the tokens in `unread`, which
        were removed from the mailbox. Idempotent.
        """
        if self.mailbox is not None:
            if self.source is None:
                for index, delta in (*unread, *self.mailbox.take()):
                    if self.choices[index].finish_reason is None:
                        self.choices[index].num_output_tokens += len(delta.token_ids)
            self.mailbox.close()
        if self.request.turn is not None:
            self.request.turn.end()

    def _accept(self, index: int, delta: Delta) -> Piece:
        if not self.was_taken:
            self.was_taken = delta.num_cached_tokens is not None or bool(
                delta.token_ids or delta.pooled
            )
        if delta.error is not None:
            raise delta.take_error()
        choice = self.choices[index]
        piece = choice.accept(delta)
        if piece.finish_reason is not None and self.mailbox is not None:
            if delta.finish is None:
                self.mailbox.abort(index)
            if choice.called and not (self.request.program and self.request.program.tool):
                self.mailbox.end_turn(index, joined_tools(choice.called))
        if self.request.turn is not None:
            self.request.turn.add(piece.token_ids, piece.finish_reason, piece.stop_reason)
        return piece

    def usage(self) -> Usage:
        """Returns the token counts so far. Cached tokens are counted only for the first answer to
        each prompt.
        """
        firsts, program = self.choices[:: self.request.num_candidates], self.request.program
        return Usage(
            num_prompt_tokens=sum(choice.num_prompt_tokens for choice in firsts),
            num_cached_tokens=sum(choice.num_cached_tokens for choice in firsts),
            num_generated_tokens=sum(choice.num_output_tokens for choice in self.choices),
            num_reasoning_tokens=self._num_reasoning_tokens(),
            is_wish_clipped=program is not None and program.keep_seconds > MAX_KEEP_SECONDS,
        )

    def _num_reasoning_tokens(self) -> int | None:
        form = self.request.output_form
        if form is None or form.reasoning is None:
            return None
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    def finish_reasons(self) -> list[str]:
        """Returns the finish reasons of the ended answers, in order of the answers' indices."""
        return [c.finish_reason.value for c in self.choices if c.finish_reason is not None]


@dataclass(slots=True)
class Answer:
    """One answer, joined from its pieces."""

    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    last: Piece = field(default_factory=lambda: Piece(0))
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    pooled: bytes = b""
    """The vector of the prompt as little-endian float32 numbers."""
    message: ParsedMessage = field(default_factory=ParsedMessage)
    """The content, reasoning and tool calls that were parsed from the text. It is empty if the
    whole text is content, because the request has no `output_form`.
    """
    _text: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._text)

    def add(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self.message.add(piece.events or ())
        self.token_ids += piece.token_ids
        self.offsets += piece.offsets or ()
        self.logprobs = joined(self.logprobs, piece.logprobs)
        self.prompt_logprobs = joined(self.prompt_logprobs, piece.prompt_logprobs)
        self.pooled = piece.pooled or self.pooled
        self.last = piece


def best_answers(answers: Sequence[Answer], request: ClientRequest) -> list[Answer]:
    """Returns, for each prompt, the best `n` of the `best_of` generated answers, best first.

    By OpenAI's definition, the best answer has the highest mean log-probability per token. Among
    equal answers, the answer with the lowest index is the best. Log-probabilities that the client
    did not request are removed.
    """
    if not request.is_ranked:
        return list(answers)
    returned: list[Answer] = []
    for first in range(0, len(answers), request.num_candidates):
        candidates = answers[first : first + request.num_candidates]
        returned += sorted(candidates, key=_mean_logprob, reverse=True)[: request.n]
    if request.sampling.logprobs is None:
        for answer in returned:
            answer.logprobs = None
    return returned


def _mean_logprob(answer: Answer) -> float:
    rows = answer.logprobs
    if rows is None or not len(rows):
        return float("-inf")
    return sum(rows.logprobs[:: rows.width]) / len(rows)
