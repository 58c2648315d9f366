"""What a client asks, and the sequences it becomes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from services.common.adapter import Adapter
from services.common.errors import InvalidArgument, OutOfRange
from services.common.pooling import Pooler, PoolingParams, PoolingTask
from services.common.prompt_embeds import PromptEmbeds
from services.common.sampling import MAX_INT32, SamplingParams
from services.common.sampling_limits import check_sampling, check_token_ids
from services.common.seeds import answer_seed
from services.common.trace_headers import UNTRACED, TraceHeaders
from services.gateway.core.parsing.output_form import OutputForm
from services.gateway.core.tenant import ANYONE, Tenant

if TYPE_CHECKING:
    from services.gateway.core.client_session import ClientSession

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_CACHE_SALT_BYTES = 256
MAX_SESSION_ID_BYTES = 256
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
CHAT_ROLES = tuple(role for role in get_args(ChatRole) if role != "tool")
"""Those of a conversation over gRPC, whose turns have no calls."""
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
OTHER_RUNNER = "OTHER_RUNNER"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request may be: the tightest of all replicas that are ready.

    `capacity` is the longest sequence, prompt and output together, that model and pool can hold.
    """

    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    priority_scheduling: bool
    hidden_size: int
    pooler: Pooler | None = None
    """What the model answers prompts with in place of tokens; None if it generates."""

    @property
    def capacity(self) -> int:
        return min(self.max_model_len, self.max_request_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt: one that is to be continued must leave room for a token."""
        return self.capacity if self.pooler is not None else self.capacity - 1


def tightest_limits(limits: Sequence[ModelLimits]) -> ModelLimits:
    """What a request may be that any of several replicas may get."""
    if len(limits) == 1:
        return limits[0]
    return ModelLimits(
        max_model_len=min(one.max_model_len for one in limits),
        max_request_tokens=min(one.max_request_tokens for one in limits),
        vocab_size=min(one.vocab_size for one in limits),
        eos_token_ids=limits[0].eos_token_ids,
        priority_scheduling=all(one.priority_scheduling for one in limits),
        hidden_size=limits[0].hidden_size,
        pooler=limits[0].pooler,
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens; with its text, and where in it each token starts, in characters, where
    the client wants it back.

    With `embeds` the tokens are placeholders. `num_first_text_tokens`: see PoolingParams.
    """

    token_ids: list[int]
    text: str | None = None
    offsets: list[int] | None = None
    embeds: PromptEmbeds | None = None
    num_first_text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request at the edge, whatever protocol it came by: n answers to each prompt, the best of
    `best_of` where that is given.

    `default_max_tokens` holds where `sampling.max_tokens` is None; None is "as many as fit".
    `prompt_only` asks for nothing but the prompt (echo with max_tokens 0). Requests with the same
    `session_id`, where it is given, are expected to repeat one another's prompts. With `pooling` it
    asks for a vector of each prompt, and nothing is generated.
    """

    request_id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    """Whether the whole prompt is computed, whatever is cached of it."""
    default_max_tokens: int | None = None
    prompt_only: bool = False
    session_id: str = ""
    tenant: Tenant = ANYONE
    best_of: int | None = None
    pooling: PoolingParams | None = None
    session: "ClientSession | None" = None
    """The session of which it is a turn; None if it stands alone."""
    turn: int = 0
    """The number of that turn, from 0."""
    output_form: OutputForm | None = None
    """What its answers are read as; None: they are text."""
    adapter: Adapter | None = None
    """The adapter that it names in place of the model."""

    @property
    def num_candidates(self) -> int:
        """Answers that are generated to each prompt; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_choices(self) -> int:
        """Answers that are generated to all prompts."""
        return len(self.prompts) * self.num_candidates

    @property
    def is_ranked(self) -> bool:
        """Whether answers are generated that are not returned."""
        return self.num_candidates > self.n


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence, complete: seed, max_tokens and end-of-sequence tokens are set; priority and
    cache_salt are those that the tenant gets.
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
    """When the client gives up, on the engine's clock; None without a deadline."""
    session_id: str = ""
    tenant: Tenant = ANYONE
    num_choices: int = 0
    """The client's n, in the first sequence of a prompt; 0 in the others."""
    pooling: PoolingParams | None = None
    """How its prompt is pooled; None if it is continued."""
    skip_reading_prefix_cache: bool = False
    """Whether its whole prompt is computed, whatever is cached of it."""
    session: "ClientSession | None" = None
    """The session of which it is a turn, whose tokens its prompt begins with; None if it stands
    alone.
    """
    adapter: Adapter | None = None

    @property
    def adapter_digest(self) -> bytes:
        """By which its cached blocks are told apart; empty without an adapter."""
        return b"" if self.adapter is None else self.adapter.digest


def is_request_id(name: str) -> bool:
    """Whether a client may name its request so: the name stands in logs, traces and answers."""
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises InvalidArgument unless `is_request_id`."""
    if not is_request_id(name):
        raise InvalidArgument(
            "request_id must be 1 to 128 printable ASCII characters, without spaces",
            field="request_id",
        )


def check_request(request: ClientRequest, limits: ModelLimits) -> None:
    """Raises InvalidArgument that names what cannot be served; prompts are checked apart."""
    if request.n < 1:
        raise InvalidArgument(f"n must be at least 1, not {request.n}", field="n")
    if request.num_candidates < request.n:
        raise InvalidArgument(
            f"best_of is {request.best_of}, but n={request.n} answers are to be returned",
            field="best_of",
        )
    if not request.prompts:
        raise InvalidArgument("prompt must not be empty", field="prompt")
    _check_runner(request, limits)
    check_sampling(request.sampling, limits.vocab_size)
    _check_stop(request.stop)
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidArgument(
            f"cache_salt may be {MAX_CACHE_SALT_BYTES} bytes long", field="cache_salt"
        )
    if "\0" in request.cache_salt:
        raise InvalidArgument("cache_salt must not hold NUL", field="cache_salt")
    if len(request.session_id.encode()) > MAX_SESSION_ID_BYTES:
        raise InvalidArgument(
            f"session_id may be {MAX_SESSION_ID_BYTES} bytes long", field="session_id"
        )
    _check_priority(request.priority, limits)


def to_engine_requests(
    request: ClientRequest,
    limits: ModelLimits,
    *,
    seed: int,
    arrival_unix_nanos: int,
    trace: TraceHeaders = UNTRACED,
    deadline: float | None = None,
) -> list[EngineRequest]:
    """The sequences of a checked request, prompt by prompt.

    Where the request names no seed, those of its sequences are derived from `seed`. Where the best
    answers are to be found, each comes with the log-probabilities of its tokens.
    """
    eos_token_ids = () if request.ignore_eos else limits.eos_token_ids
    sampling, num_candidates = request.sampling, request.num_candidates
    if request.is_ranked and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    priority = request.priority
    if limits.priority_scheduling:
        priority = request.tenant.effective_priority(priority)
    cache_salt = request.tenant.effective_cache_salt(request.cache_salt)
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
                    tenant=request.tenant,
                    num_choices=0 if child else request.n,
                    skip_reading_prefix_cache=request.skip_reading_prefix_cache,
                    session=request.session,
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
    if request.sampling.max_tokens is not None:
        return request.sampling.max_tokens
    return room if request.default_max_tokens is None else min(room, request.default_max_tokens)


def check_prompt(prompt: Prompt, sampling: SamplingParams, limits: ModelLimits) -> None:
    """Raises InvalidArgument or OutOfRange for a prompt that cannot be served."""
    length = len(prompt.token_ids)
    if length == 0:
        raise InvalidArgument("prompt must not be empty: it has no tokens", field="prompt")
    if prompt.embeds is not None:
        prompt.embeds.check(limits.hidden_size)
        if sampling.prompt_logprobs is not None:
            raise InvalidArgument(
                "prompt_logprobs: an embedded prompt has no tokens", field="prompt_logprobs"
            )
    if length > limits.max_prompt_tokens:
        raise prompt_too_long(f"{length} tokens", limits)
    if prompt.embeds is None:
        check_token_ids("prompt", prompt.token_ids, limits.vocab_size)
    if limits.pooler is not None:
        return
    if sampling.max_tokens is not None and length + sampling.max_tokens > limits.capacity:
        raise OutOfRange(
            f"{_context_length(limits)} max_tokens is {sampling.max_tokens} and the prompt has "
            f"{length}, together {length + sampling.max_tokens}",
            field="max_tokens",
            reason=CONTEXT_LENGTH_EXCEEDED,
        )
    room = limits.capacity - length if sampling.max_tokens is None else sampling.max_tokens
    if sampling.min_tokens > room:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}, but at most {room} can be generated",
            field="min_tokens",
        )


def prompt_too_long(size: str, limits: ModelLimits) -> OutOfRange:
    """The refusal of a prompt that has `size`, such as "600 tokens"."""
    sentence = f"{_context_length(limits)} prompt has {size}"
    if limits.pooler is None:
        sentence += ", which leaves no room for an answer"
    return OutOfRange(
        sentence,
        field="prompt",
        reason=CONTEXT_LENGTH_EXCEEDED,
    )


def _context_length(limits: ModelLimits) -> str:
    """The beginning of an error about what is too long.

    Clients recognize such an error by it, which is OpenAI's and vLLM's: LiteLLM searches the text
    for it, LangChain compares the code.
    """
    sentence = f"This model's maximum context length is {limits.capacity} tokens"
    if limits.max_request_tokens < limits.max_model_len:
        sentence += ", which is what this server's KV cache holds of one request"
    return sentence + ":"


def _check_runner(request: ClientRequest, limits: ModelLimits) -> None:
    """Raises InvalidArgument for a request that the model is not made for."""
    pooler = limits.pooler
    if request.pooling is None and pooler is not None:
        kind = "scores" if pooler.task is PoolingTask.CLASSIFY else "embeddings"
        raise InvalidArgument(
            f"this model gives {kind} and generates no text: ask for /"
            + ("score" if pooler.task is PoolingTask.CLASSIFY else "v1/embeddings"),
            field="model",
            reason=OTHER_RUNNER,
        )
    if request.pooling is not None and pooler is not None:
        pooler.check(request.pooling, max(len(prompt.token_ids) for prompt in request.prompts))


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken", field="stop"
        )
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidArgument(
                f"stop: a string must have 1 to {MAX_STOP_STRING_LENGTH} characters, not "
                f"{len(text)}",
                field="stop",
            )


def _check_priority(priority: int, limits: ModelLimits) -> None:
    if abs(priority) > MAX_INT32:
        raise InvalidArgument("priority must fit in 32 bits", field="priority")
    if priority and not limits.priority_scheduling:
        raise InvalidArgument(
            "priority must be 0: this server runs requests in order of arrival", field="priority"
        )
