"""What the core needs from outside: schedulers, a clock, a tokenizer. DeltaSource, Source and
Engine are what its parts know of each other: the fleet towards a generation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.admission.wait import Wait
from services.gateway.core.fleet.route import Route
from services.gateway.core.fleet.sequence_trace import SequenceTrace
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.progress import Progress
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.truncation import Truncation
from services.gateway.core.tenant import Tenant

if TYPE_CHECKING:
    from services.gateway.core.fleet.replica import Replica

TIMER_SLACK_SECONDS = 0.001
"""The time by which an event loop's clock may make a call too early."""


class DeltaSource(Protocol):
    """The output of the sequences of one request."""

    routes: list[Route]
    """Where they were sent, in order."""
    waits: list[Wait]
    """The waits of sequences that did not go to a replica at once, or were preempted."""
    traces: list[SequenceTrace]
    """The trace of each sequence; empty if another gateway runs them."""

    def take(self) -> list[tuple[int, Delta]]:
        """What came since the last call: (index of the sequence, its delta), each index at most
        once.
        """

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news`, in place of what was passed before, whenever something comes. After a
        sequence's first tokens, a source may wait until there are `min_tokens` of it.
        """

    def abort(self, index: int) -> None:
        """Ends this sequence, since a stop string was found in it. Idempotent."""

    def close(self) -> None:
        """Ends all sequences and their output. Idempotent."""


class Source(Protocol):
    """A source of deltas: an engine that generates them, or a recording of them."""

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """The output of sequences, from their beginning on."""


@dataclass(frozen=True, slots=True)
class Made:
    """How much of an answer was made so far."""

    num_tokens: int
    """Generated tokens of all sequences."""
    num_cached_tokens: tuple[int | None, ...]
    """Cached tokens of each sequence's prompt; None for one that was not scheduled."""


class KeptSource(Source, Protocol):
    """A source that may go on when its reader has gone."""

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        """Makes a call once, when the answer has ended or stopped; now if it is not being made."""


class ResumingEngine(Protocol):
    """An engine that resumes sequences that another engine began."""

    def model_fingerprint(self) -> bytes:
        """The fingerprint of the model in use; empty until a replica was connected once."""

    def start(
        self, requests: Sequence[EngineRequest], progress: Sequence[Progress] = ()
    ) -> DeltaSource:
        """Begins sequences, as Engine does. With `progress`, one for each of them, they go on from
        there, and those that have ended are left out.
        """


class Engine(Source, Protocol):
    """Every replica of the model, seen as one."""

    def limits(self) -> ModelLimits:
        """The limits of a request. Raises Unavailable until a replica was ready once."""

    def check_room(self, tenant: Tenant, deadline: float | None) -> None:
        """Raises ResourceExhausted where a request of the tenant with this deadline would be
        refused now, DeadlineExceeded where it would not be done in time.

        It is an estimate; the scheduler decides after `start`.
        """

    def arriving(self, tenant: Tenant, deadline: float | None) -> Arrival:
        """Raises what `check_room` does, and counts a request until its `end`: `start` follows."""

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Sends sequences to a replica; while none is ready they wait, in order of arrival.

        A sequence survives the loss of its replica: it is sent again with the tokens that came so
        far, and its deltas go on without a lost or repeated token.
        """


class Link(Protocol):
    """The way to one scheduler. What comes back is passed to its Replica."""

    def add(self, handle: int, inflight: Inflight) -> None:
        """Sends a sequence with its tokens so far, soon and in order. `handle` names it from here
        on. What was not sent when the session ends is dropped.
        """

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        """Sends what a turn adds to the `num_tokens` tokens of the session of this handle."""

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:
        """Ends a sequence there; nothing more comes of it. `was_stopped`: a stop string ended its
        text.
        """


class Links(Protocol):
    """The ways to all schedulers."""

    def make(self, address: str) -> Link:
        """The way to the scheduler at an address. It is not used before `open`."""

    def open(self, replica: "Replica") -> None:
        """Keeps a session with the replica's scheduler open, over the link that was made for its
        address.
        """

    def close(self, replica: "Replica") -> None:
        """Ends the session and tries no more."""


class Timer(Protocol):
    """A call at a later time."""

    def cancel(self) -> None:
        """Cancels the call. Idempotent."""


class Clock(Protocol):
    """Steady time in seconds, by which deadlines are given; asyncio's event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Calls `callback` at that time or, if it has passed, soon."""


class PrefixDirectory(Protocol):
    """What the pools of all replicas have cached."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """How many blocks of a chain, from the first on, are cached by each node; nodes without any
        are left out. `keys` belong to the chain's blocks: see `services.common.pool.kv_directory`.
        """
        ...


class Grammars(Protocol):
    """Judges what outputs are to conform to."""

    async def check(
        self, wanted: StructuredOutputs, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Raises InvalidArgument for what an output of this vocabulary cannot be held to, and
        ResourceExhausted while too many others are compiled.
        """


class TextTooLong(Exception):
    """The text at `number` has `num_tokens` tokens, or more where that is not exact."""

    def __init__(self, num_tokens: int, number: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.number = number
        self.is_exact = is_exact


class Tokenizer(Protocol):
    """Text to tokens and back. Long work happens off the event loop."""

    is_byte_level: bool
    """Whether text is exactly the concatenation of `token_bytes`."""
    byte_values: Mapping[int, int]
    """The byte of each token that stands for a single one and is text only together with the byte
    tokens beside it (SentencePiece's byte fallback); empty for other tokenizers.
    """
    special_ids: frozenset[int]
    """Tokens that are no text: end of sequence, roles, padding."""
    eos_token_id: int | None
    """The token that the tokenizer names as end of sequence; None if it names none."""
    max_token_bytes: int
    """Most bytes that one token stands for."""
    has_chat_template: bool
    """Whether conversations can be rendered."""

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int
    ) -> list[list[int]]:
        """Token ids of plain texts. Raises TextTooLong for a text of more than `max_tokens`."""

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int
    ) -> list[tuple[list[int], int]]:
        """Token ids of two texts in one prompt, as the tokenizer joins them, and how many of them
        come before the second text where token types tell the texts apart; else 0. Raises
        TextTooLong for a pair of more than `max_tokens`.
        """

    async def encode_truncated(
        self, prompts: Sequence[tuple[str, ...]], kept: Truncation, *, add_special_tokens: bool
    ) -> list[tuple[list[int], int]]:
        """The same of prompts of one text or two, of which a part is kept."""

    async def token_starts(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Where in each text its tokens start, in characters; one that holds a part of a character
        starts where the character does.
        """

    async def token_offsets(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[tuple[int, int]]]:
        """The part of each text that each of its tokens is made of, in characters; (0, 0) for a
        token that was added to it.
        """

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """A conversation as the model's chat template writes it. The content of a message is a
        text, or a list of the texts of its parts.

        Raises InvalidArgument when the template does not take it.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids of any number, special tokens included."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a few token ids. Ids the tokenizer does not know have no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; none for an id the tokenizer does not know."""

    def description(self) -> Mapping[str, Any]:
        """The tokenizer's configuration as JSON, without paths of files."""

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it."""
