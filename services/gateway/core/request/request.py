"""A client's request, and its sequences (the prompt and one answer each), which are sent to the
replicas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from services.common.request.adapter import Adapter
from services.common.request.finish import FinishReason
from services.common.request.pooling import PoolingParams
from services.common.request.program import DeclaredProgram
from services.common.request.prompt_embeds import PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.common.request.seeds import answer_seed
from services.common.telemetry.trace_headers import UNTRACED, TraceHeaders
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.text.parsing.output_form import OutputForm

ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
CHAT_ROLES = tuple(role for role in get_args(ChatRole) if role != "tool")
"""The roles of chat messages over gRPC, which have no tool calls and therefore no role `tool`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens or embeddings."""

    token_ids: list[int]
    text: str | None = None
    """The text of the prompt, if the client requested that the prompt is returned (echo)."""
    offsets: list[int] | None = None
    """For each token, the number of characters in `text` before it."""
    embeds: PromptEmbeds | None = None
    """Embeddings instead of tokens. The token ids are then placeholders."""
    num_first_text_tokens: int = 0
    """Number of tokens before the second text, if the prompt is a pair of texts."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request over HTTP or gRPC: `n` answers to each prompt."""

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that are kept in an answer's text, because the answer's parser needs them."""
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    """Whether the whole prompt is computed, even if the prefix cache contains a part of it."""
    default_max_tokens: int | None = None
    """Maximum number of tokens of an answer if `sampling.max_tokens` is None. If both are None, an
    answer may have as many tokens as fit into the context.
    """
    prompt_only: bool = False
    """Whether only the prompt is returned (echo with max_tokens 0)."""
    session_id: str = ""
    """Requests with the same id are expected to share prompt prefixes."""
    program: DeclaredProgram | None = None
    """The client's data about the agent program to which the request belongs. An agent program is a
    series of requests with tool calls between them.
    """
    caller: Caller = ANYONE
    best_of: int | None = None
    """Number of answers generated for each prompt. The best `n` are returned. None means `n`."""
    pooling: PoolingParams | None = None
    """How each prompt is converted to a vector. It is None if text is generated."""
    turn: "Turn | None" = None
    """The request as a turn of a client's session, or None if it belongs to no session."""
    output_form: OutputForm | None = None
    """How answers are parsed into content, reasoning and tool calls. None means only content."""
    adapter: Adapter | None = None
    """The LoRA adapter that the client requested in place of the model."""

    @property
    def num_candidates(self) -> int:
        """Number of answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_choices(self) -> int:
        """Number of answers that are generated for all prompts together."""
        return len(self.prompts) * self.num_candidates

    @property
    def is_ranked(self) -> bool:
        """Whether more answers are generated than returned, so that the best must be found."""
        return self.num_candidates > self.n


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence of a client's request with all defaults filled in: `sampling` has a seed,
    max_tokens and end-of-sequence tokens. The client's priority and cache_salt were replaced by the
    effective values for the caller.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int
    cache_salt: str
    arrival_unix_nanos: int
    trace: TraceHeaders = UNTRACED
    prompt_embeds: PromptEmbeds | None = None
    deadline: float | None = None
    """The client's deadline in seconds on the event loop's clock. None means no deadline."""
    session_id: str = ""
    program: DeclaredProgram | None = None
    caller: Caller = ANYONE
    num_choices: int = 0
    """For metrics: the number of answers that the client requested for the prompt. It is set only
    in the prompt's first sequence, and 0 in the prompt's other sequences.
    """
    pooling: PoolingParams | None = None
    skip_reading_prefix_cache: bool = False
    turn: "Turn | None" = None
    adapter: Adapter | None = None

    @property
    def adapter_digest(self) -> bytes:
        """SHA-256 of the adapter's files, which is part of the sequence's block hashes."""
        return b"" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """An ended sequence whose KV blocks a replica keeps for the next turn of a client's session.
    The next turn's sequence must have the same priority, cache_salt and adapter_digest.
    """

    replica: object
    handle: int
    """The number that identifies the sequence at the replica."""
    release: Callable[[], None]
    """Makes the replica free the KV blocks. Does nothing if the replica has freed them already."""
    num_tokens: int
    """Number of leading tokens whose KV blocks the replica keeps."""
    priority: int
    cache_salt: str
    adapter_digest: bytes


class Turn(Protocol):
    """A turn of a client's session, which vLLM calls a resumable request: the replica keeps the
    turn's sequence after its end, and the next turn continues this sequence at the replica.
    """

    def begin(self) -> None:
        """Called before the turn's sequence is sent to a replica."""

    def add(
        self, token_ids: Sequence[int], reason: FinishReason | None, stop: str | int | None
    ) -> None:
        """Called with new tokens. `reason` is None before the answer's end. `stop` is the stop
        string or the id of the stop token that ended the answer.
        """

    def end(self) -> None:
        """Called when the request has ended or was aborted. Idempotent."""

    def take_held(self, request: EngineRequest) -> HeldSequence | None:
        """Returns and forgets the kept sequence that `request` continues, if there is one."""

    def hold(self, held: HeldSequence) -> None:
        """Called when the turn's sequence has ended, and the replica keeps its KV blocks."""

    def drop_held(self) -> None:
        """Called when the replica no longer keeps the KV blocks."""


def to_engine_requests(
    request: ClientRequest,
    limits: ModelLimits,
    *,
    seed: int,
    arrival_unix_nanos: int,
    trace: TraceHeaders = UNTRACED,
    deadline: float | None = None,
) -> list[EngineRequest]:
    """Makes the sequences of a checked request, in order of the prompts.

    If the request has no seed, the sequences' seeds are derived from `seed`. If more answers are
    generated than returned, the sequences request log-probabilities, which are needed to find the
    best answers.
    """
    eos_token_ids = () if request.ignore_eos else limits.eos_token_ids
    sampling, num_candidates = request.sampling, request.num_candidates
    if request.is_ranked and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    priority = request.priority
    if limits.priority_scheduling:
        priority = request.caller.effective_priority(priority)
    cache_salt = request.caller.effective_cache_salt(request.cache_salt)
    sequences: list[EngineRequest] = []
    for number, prompt in enumerate(request.prompts):
        max_tokens = _max_tokens(request, len(prompt.token_ids), limits)
        for child in range(num_candidates):
            name = request.request_id
            sequences.append(
                EngineRequest(
                    request_id=name if request.num_choices == 1 else f"{name}-{len(sequences)}",
                    prompt_token_ids=prompt.token_ids,
                    prompt_embeds=prompt.embeds,
                    sampling=replace(
                        sampling,
                        seed=answer_seed(sampling.seed, seed, number, child, num_candidates),
                        max_tokens=max_tokens,
                        eos_token_ids=eos_token_ids,
                    ),
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_unix_nanos=arrival_unix_nanos,
                    trace=trace,
                    deadline=deadline,
                    session_id=request.session_id,
                    program=request.program,
                    caller=request.caller,
                    num_choices=0 if child else request.n,
                    skip_reading_prefix_cache=request.skip_reading_prefix_cache,
                    turn=request.turn,
                    adapter=request.adapter,
                    pooling=request.pooling
                    and replace(
                        request.pooling, num_first_text_tokens=prompt.num_first_text_tokens
                    ),
                )
            )
    return sequences


def _max_tokens(request: ClientRequest, num_prompt_tokens: int, limits: ModelLimits) -> int:
    room = limits.capacity - num_prompt_tokens
    if request.pooling is not None:
        return 0
    if request.prompt_only:
        return 1
    wanted = request.sampling.max_tokens
    if wanted is None:
        wanted = request.default_max_tokens
    return room if wanted is None else min(room, wanted)
