"""The interfaces that the core uses: schedulers, a clock, a tokenizer. DeltaSource, Source and
Engine are interfaces within the core, through which a generation uses the fleet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.admission.wait import Wait
from services.gateway.core.fleet.routing_decision import RoutingDecision
from services.gateway.core.fleet.sequence_trace import SequenceTrace
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.request.truncation import Truncation
from services.gateway.core.tenant import Tenant

if TYPE_CHECKING:
    from services.gateway.core.fleet.replica import Replica

TIMER_SLACK_SECONDS = 0.001
"""An event loop may run a callback up to this number of seconds before its time."""


class DeltaSource(Protocol):
    """The output of a request's sequences."""

    routes: list[RoutingDecision]
    """The routes of the sequences in the order of sending."""
    waits: list[Wait]
    """The waits of sequences that were not sent to a replica at once, or were preempted."""
    traces: list[SequenceTrace]
    """The trace of each sequence. Empty if another gateway runs the sequences."""

    def take(self) -> list[tuple[int, Delta]]:
        """Returns the output since the last call as pairs of a sequence's index and its delta. Each
        index occurs at most once.
        """

    def listen(self, on_news: Callable[[], None], min_tokens: int = 1) -> None:
        """Calls `on_news` when there is new output. Replaces an earlier callback. After a
        sequence's first tokens, a source may wait until it has `min_tokens` new tokens.
        """

    def abort(self, index: int) -> None:
        """Ends this sequence, because a stop string was found. Idempotent."""

    def close(self) -> None:
        """Ends all sequences and their output. Idempotent."""


class Source(Protocol):
    """A source of deltas: an engine that generates them, or a recording."""

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Starts sequences; returns their output from the beginning."""


@dataclass(frozen=True, slots=True)
class Made:
    """The number of an answer's tokens that were generated so far, and of its prompts' tokens that
    were found in the cache.
    """

    num_tokens: int
    """Number of generated tokens of all sequences."""
    num_cached_tokens: tuple[int | None, ...]
    """Number of cached prompt tokens of each sequence. None for a sequence that was not
    scheduled.
    """


class KeptSource(Source, Protocol):
    """A source that may continue after its reader has left."""

    def when_making_ends(self, call: Callable[[Made], None]) -> None:
        """Calls `call` once when the answer has ended or stopped. If the answer is not being
        generated, calls it at once.
        """


class Engine(Source, Protocol):
    """All replicas of the model as one engine."""

    def limits(self) -> ModelLimits:
        """Returns the limits of a request. Raises Unavailable if no replica has been ready so
        far.
        """

    def check_room(self, tenant: Tenant, deadline: float | None) -> None:
        """Raises ResourceExhausted if a request of the tenant would be refused now, and
        DeadlineExceeded if it would not end by its deadline.

        The result is an estimate. The scheduler decides after `start`.
        """

    def arriving(self, tenant: Tenant, deadline: float | None) -> Arrival:
        """Checks for room like `check_room`, and raises the same errors. Counts the request until
        `end` is called on the returned Arrival. The caller calls `start` next.
        """

    def start(self, requests: Sequence[EngineRequest]) -> DeltaSource:
        """Sends sequences to a replica. While no replica is ready, they wait in order of arrival.

        If a replica is lost, its sequences are sent to another one with the tokens that they have
        generated. No token is lost or repeated in their deltas.
        """


class Link(Protocol):
    """The connection to one scheduler. It calls the methods of its Replica with received
    results.
    """

    def add(self, handle: int, inflight: Inflight) -> None:
        """Sends a sequence with the tokens that it has generated. `handle` identifies the sequence
        in later calls. Sequences are sent soon, in the order of calls. If the session ends first,
        the sequence is not sent.
        """

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        """Sends the tokens that a turn adds to the first `num_tokens` tokens of a client's session.
        `handle` identifies the client's session.
        """

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:
        """Ends a sequence at the scheduler. No more results follow. `was_stopped` is true if a stop
        string ended the sequence.
        """


class Links(Protocol):
    """The connections to all schedulers."""

    def make(self, address: str) -> Link:
        """Makes the link to the scheduler at an address. The link is not used before `open`."""

    def open(self, replica: "Replica") -> None:
        """Opens a session with the replica's scheduler over its link, and reopens it whenever it
        ends.
        """

    def close(self, replica: "Replica") -> None:
        """Ends the session, and opens no new one."""


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Cancels the callback. Idempotent."""


class Clock(Protocol):
    """Steady time in seconds, used for deadlines. asyncio's event loop implements it."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Calls `callback` at the time `when`, or soon if that time has passed."""


class PrefixDirectory(Protocol):
    """The cached prefixes of all replicas' pools."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Returns a map from nodes (the pools in the directory) to the number of leading blocks of
        a chain that the node has cached. Nodes without any are omitted. `keys` are the keys of the
        chain's blocks, as `services.common.pool.kv_directory` defines them.
        """
        ...


class Grammars(Protocol):
    """Checks structured-output constraints."""

    async def check(
        self, wanted: StructuredOutputs, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Raises InvalidArgument if a constraint cannot be compiled for this vocabulary, and
        ResourceExhausted if too many other constraints are being compiled.
        """


class TextTooLong(Exception):
    """The text with index `number` is too long. It has `num_tokens` tokens. If this number is not
    exact, the text has at least that many.
    """

    def __init__(self, num_tokens: int, number: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.number = number
        self.is_exact = is_exact


class Tokenizer(Protocol):
    """Converts text to tokens and back. Long work runs off the event loop."""

    is_byte_level: bool
    """Whether the text of tokens is exactly the concatenation of their `token_bytes`."""
    byte_values: Mapping[int, int]
    """Maps byte tokens (SentencePiece's byte fallback) to their bytes. The text of a byte token
    depends on the adjacent byte tokens. Empty for other tokenizers.
    """
    special_ids: frozenset[int]
    """Ids of the special tokens, which are not text, such as end of sequence, roles and padding."""
    eos_token_id: int | None
    """The tokenizer's end-of-sequence token. None if it has no such token."""
    max_token_bytes: int
    """Number of bytes of the longest token."""
    has_chat_template: bool
    """Whether conversations can be rendered."""

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int
    ) -> list[list[int]]:
        """Returns the token ids of plain texts. Raises TextTooLong if a text has more than
        `max_tokens` tokens.
        """

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int
    ) -> list[tuple[list[int], int]]:
        """Returns, for each pair of texts, the token ids of one prompt with both texts, and the
        number of tokens before the second text. The number is 0 if the tokenizer's token types do
        not distinguish the texts. Raises TextTooLong if a prompt has more than `max_tokens` tokens.
        """

    async def encode_truncated(
        self, prompts: Sequence[tuple[str, ...]], kept: Truncation, *, add_special_tokens: bool
    ) -> list[tuple[list[int], int]]:
        """Returns, for each prompt of one or two texts, the token ids of the kept part, and the
        number of tokens before the second text. The number is 0 if it is not known.
        """

    async def token_starts(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Returns, for each text, the position in characters at which each token starts. A token
        that contains only part of a character starts where the character starts.
        """

    async def token_offsets(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[tuple[int, int]]]:
        """Returns, for each text, the start and end of each token in characters. An added special
        token has (0, 0).
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
        """Renders a conversation with the model's chat template. The content of a message is a
        text, or a list of the texts of its parts.

        Raises InvalidArgument if the template does not accept it.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of any number of token ids, including special tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of a few token ids. Unknown ids have no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token. Empty for an unknown id."""

    def description(self) -> Mapping[str, Any]:
        """Returns the tokenizer's configuration as JSON values, without file paths."""

    def token_name(self, token_id: int) -> str:
        """Returns the token's name in the vocabulary."""
