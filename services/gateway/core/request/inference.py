"""The service behind every protocol: from a checked request to a running generation."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.errors import InvalidArgument, NotFound, OutOfRange, StepwellError
from services.common.request.pooling import Pooler, PoolingTask
from services.common.request.sampling_limits import MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS
from services.common.request.structured_outputs import StructuredOutputs
from services.common.telemetry.trace_headers import UNTRACED, TraceHeaders
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.lora_modules import LoraModules
from services.gateway.core.ports import Engine, Grammars, TextTooLong, Tokenizer
from services.gateway.core.request.delivery import TOKENS_AT_A_TIME, Delivery, Sink
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import ClientRequest, to_engine_requests
from services.gateway.core.request.request_check import (
    OTHER_RUNNER,
    check_prompt,
    check_request,
    of_prompt,
    prompt_too_long,
)
from services.gateway.core.request.sampling_defaults import SamplingDefaults
from services.gateway.core.request.truncation import Truncation, truncation
from services.gateway.core.sessions.client_session import in_session
from services.gateway.core.tenant import ANYONE, Tenant
from services.gateway.core.text.parsing.output_formats import NO_FORMATS, OutputFormats
from services.gateway.core.text.parsing.special_tokens import SpecialTokens

_TOKENS_CHECKED_AT_A_TIME = 65_536
"""Tokens of prompts that are checked in one turn of the event loop."""
_MAX_NAMES = 8
"""Models that an error names."""
_ANSWERS_AT_A_TIME = 32
"""Answers of a request above which the event loop turns between two pieces of work for them."""


class Inference:
    """Checks the requests of clients, tokenizes their prompts, and makes the generations that run
    at the engine. HTTP and gRPC are served from it.
    """

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        engine: Engine,
        grammars: Grammars,
        *,
        output_formats: OutputFormats = NO_FORMATS,
        defaults: SamplingDefaults,
        adapters: LoraModules | None = None,
        max_choices: int,
        max_items: int,
        max_logprobs: int,
        stream_interval: int = 1,
        draw_seed: Callable[[], int],
        unix_nanos: Callable[[], int],
    ) -> None:
        """Of one request `max_choices` bounds the answers, `max_items` the values in its lists, and
        `max_logprobs` the log-probabilities of answers that are not streamed. `stream_interval`
        tokens of a stream are sent together. `draw_seed` gives seeds below 2**64.
        """
        self.model_name = model_name
        self.adapters = adapters or LoraModules(model_name)
        self.tokenizer = tokenizer
        self.special_tokens = SpecialTokens(tokenizer)
        self.output_formats = output_formats
        self.default_sampling = defaults.sampling
        self.max_items = max_items
        self.max_logprobs = max_logprobs
        self._defaults = defaults
        self._engine = engine
        self._grammars = grammars
        self._max_choices = max_choices
        self._stream_interval = stream_interval
        self._draw_seed = draw_seed
        self._unix_nanos = unix_nanos

    def check_model(self, name: str | None, tenant: Tenant = ANYONE) -> None:
        """Raises NotFound unless the name is the model's or an adapter's, or none is given, and
        PermissionDenied where the tenant may not use it.
        """
        if (adapter := self.adapters.find(name)) is not None:
            tenant.check_model(adapter.name)
            return
        if name and name != self.model_name:
            raise NotFound(
                f"there is no model {name[:100]!r} here; this server has {self._names_for(tenant)}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )
        tenant.check_model(self.model_name)

    def _names_for(self, tenant: Tenant) -> str:
        """The models that a tenant may use, as far as a sentence goes."""
        names = [self.model_name, *(adapter.name for adapter in self.adapters)]
        allowed = [repr(name) for name in names if tenant.may_use(name)]
        more = f" and {len(allowed) - _MAX_NAMES} more" if len(allowed) > _MAX_NAMES else ""
        return (", ".join(allowed[:_MAX_NAMES]) or "none that this key may use") + more

    def limits(self) -> ModelLimits:
        """The limits of a request. Raises Unavailable before the first replica is ready.

        A sequence ends at the tokens that the model's configuration names and, as in vLLM, at the
        tokenizer's own: fine-tunes for chat often change the tokenizer alone.
        """
        limits = self._engine.limits()
        eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None or eos_token_id in limits.eos_token_ids:
            return limits
        if eos_token_id >= limits.vocab_size:  # the model has no such token, and never gives it
            return limits
        return replace(limits, eos_token_ids=(*limits.eos_token_ids, eos_token_id))

    def check_pools(self, task: PoolingTask | None = None) -> Pooler:
        """What the model answers prompts with in place of tokens. Raises InvalidArgument if it does
        not, or does something else than this task.
        """
        pooler = self.limits().pooler
        if pooler is None:
            raise InvalidArgument(
                "this model generates text and gives no embeddings or scores: ask for "
                "/v1/completions, /v1/chat/completions, /v1/messages or /v1/responses",
                field="model",
                reason=OTHER_RUNNER,
            )
        if task is not None and pooler.task is not task:
            raise InvalidArgument(
                "this model gives scores and no embeddings: ask for /score",
                field="model",
                reason=OTHER_RUNNER,
            )
        return pooler

    def check_room(self, tenant: Tenant, deadline: float | None) -> None:
        """Raises ResourceExhausted where the engine is known to refuse one more request, or
        DeadlineExceeded.

        Called before the prompt is tokenized: under overload most requests are refused.
        """
        self._engine.check_room(tenant, deadline)

    def arriving(
        self, tenant: Tenant, deadline: float | None, *, needs_room: bool = True
    ) -> Arrival:
        """Counts a request that is read, tokenized and prepared from now on, until the `end` of the
        Arrival. Raises what `check_room` does. One whose answer is there already needs no room, and
        is not counted.
        """
        if not needs_room:
            return Arrival(Counter(), tenant)
        return self._engine.arriving(tenant, deadline)

    async def prepare(
        self,
        request: ClientRequest,
        trace: TraceHeaders = UNTRACED,
        deadline: float | None = None,
    ) -> Generation:
        """Checks a request. Raises InvalidArgument or OutOfRange before anything is sent.

        The event loop turns while many tokens are checked.
        """
        limits = self.limits()
        request = in_session(self._defaults.bounded(request))
        check_request(request, limits)
        num_checked = 0
        for number, prompt in enumerate(request.prompts):
            try:
                check_prompt(prompt, request.sampling, limits)
            except StepwellError as error:
                raise of_prompt(error, number, len(request.prompts)) from error
            num_checked += len(prompt.token_ids)
            if num_checked > _TOKENS_CHECKED_AT_A_TIME:
                await asyncio.sleep(0)
                num_checked = 0
        self.check_num_choices(len(request.prompts), request.n, request.best_of)
        if (wanted := request.sampling.structured_outputs) is not None:
            await self.check_form(wanted)
        await self._turn_for(request.num_choices)
        identity = Identity(request.request_id, self._draw_seed(), self._unix_nanos())
        sequences = to_engine_requests(
            request,
            limits,
            seed=identity.seed,
            arrival_unix_nanos=identity.arrival_unix_nanos,
            trace=trace,
            deadline=deadline,
        )
        await self._turn_for(len(sequences))
        generation = Generation(request, identity, sequences, self.tokenizer)
        await self._turn_for(len(sequences))
        return generation

    async def check_form(self, wanted: StructuredOutputs) -> None:
        """Raises InvalidArgument for a form that cannot be compiled."""
        limits = self.limits()
        await self._grammars.check(wanted, limits.vocab_size, limits.eos_token_ids)

    def again(self, generation: Generation, identity: Identity) -> Generation:
        """The same request under another identity, from its beginning."""
        request = replace(generation.request, request_id=identity.request_id)
        first = generation.sequences[0]
        sequences = to_engine_requests(
            request,
            self.limits(),
            seed=identity.seed,
            arrival_unix_nanos=identity.arrival_unix_nanos,
            trace=first.trace,
            deadline=first.deadline,
        )
        return Generation(request, identity, sequences, self.tokenizer)

    @staticmethod
    async def _turn_for(num_answers: int) -> None:
        """Lets the event loop turn where the next piece of work is for many answers."""
        if num_answers > _ANSWERS_AT_A_TIME:
            await asyncio.sleep(0)

    def delivery(self, generation: Generation, sink: Sink, *, stream: bool) -> Delivery:
        """The run of a generation, whose pieces go to the sink. If they are not streamed, as many
        tokens are put at once as may be.
        """
        source = generation.source or self._engine
        min_tokens = self._stream_interval if stream else TOKENS_AT_A_TIME
        return Delivery(generation, source, sink, min_tokens)

    def check_num_choices(self, num_prompts: int, n: int, best_of: int | None = None) -> None:
        """Raises InvalidArgument for more answers than one request may have.

        Called before the prompts are tokenized, too.
        """
        name, each = ("n", n) if best_of is None else ("best_of", best_of)
        if num_prompts * each > self._max_choices:
            raise InvalidArgument(
                f"{num_prompts} prompts with {name}={each} are {num_prompts * each} answers; one"
                f" request may have {self._max_choices}",
                field=name if each > 1 else "prompt",
            )

    def check_num_logprobs(self, generation: Generation) -> None:
        """Raises OutOfRange for more log-probabilities than are held until an answer is whole."""
        count = sum(
            (sequence.sampling.max_tokens or 0) * _width(sequence.sampling.logprobs)
            + len(sequence.prompt_token_ids) * _width(sequence.sampling.prompt_logprobs)
            for sequence in generation.sequences
        )
        if count > self.max_logprobs:
            raise OutOfRange(
                f"logprobs: the answers may have {count} log-probabilities, more than the "
                f"{self.max_logprobs} of one request; stream, or lower max_tokens or n",
                field="logprobs",
            )

    def check_num_items(self, field: str, num_items: int) -> None:
        """Raises OutOfRange for more values in a field than one request may hold."""
        if num_items > self.max_items:
            raise OutOfRange(
                f"{field} holds {num_items} items; one request may hold {self.max_items}",
                field=field,
            )

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, kept: Truncation | None = None
    ) -> list[list[int]]:
        """Token ids of prompts, or of what is `kept` of them. Raises OutOfRange for one that
        cannot fit.
        """
        limits = self.limits()
        if kept is not None:
            prompts = [(text,) for text in texts]
            encoded = await self.tokenizer.encode_truncated(
                prompts, kept, add_special_tokens=add_special_tokens
            )
            return [token_ids for token_ids, _ in encoded]
        self._check_lengths([*map(len, texts)], limits)
        try:
            return await self.tokenizer.encode(
                texts, add_special_tokens=add_special_tokens, max_tokens=limits.capacity
            )
        except TextTooLong as error:
            raise _too_long(error, limits, len(texts)) from error

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], kept: Truncation | None = None
    ) -> list[tuple[list[int], int]]:
        """See Tokenizer. Raises OutOfRange for a pair that cannot fit, unless a part is kept."""
        limits = self.limits()
        if kept is not None:
            return await self.tokenizer.encode_truncated(pairs, kept, add_special_tokens=True)
        self._check_lengths([len(first) + len(second) for first, second in pairs], limits)
        try:
            return await self.tokenizer.encode_pairs(pairs, max_tokens=limits.capacity)
        except TextTooLong as error:
            raise _too_long(error, limits, len(pairs)) from error

    def truncation(
        self, num_tokens: int | None, side: str | None, max_tokens: int | None = None
    ) -> Truncation | None:
        """What is kept of prompts; None if all of each. `max_tokens` are tokens of the answer. The
        end is kept for generation and the beginning for vectors, unless `side` is the other one.
        """
        if num_tokens is None:
            return None
        limits = self.limits()
        most = limits.max_prompt_tokens
        if limits.pooler is None and max_tokens is not None:
            most = limits.capacity - max_tokens
        keeps_end = limits.pooler is None if side is None else side == "left"
        return truncation(num_tokens, most, keeps_end=keeps_end)

    def _check_lengths(self, lengths: Sequence[int], limits: ModelLimits) -> None:
        """Raises OutOfRange for a text with more characters than fit as tokens."""
        longest = limits.capacity * self.tokenizer.max_token_bytes
        for number, length in enumerate(lengths):
            if length > longest:
                error = prompt_too_long(f"{length} characters", limits)
                raise of_prompt(error, number, len(lengths))

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of any text. Raises OutOfRange for more of them than one answer holds."""
        try:
            [token_ids] = await self.tokenizer.encode(
                [text], add_special_tokens=add_special_tokens, max_tokens=self.max_items
            )
        except TextTooLong as error:
            raise OutOfRange(
                f"prompt has more than {self.max_items} tokens, which is all that one answer holds",
                field="prompt",
            ) from error
        return token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids. Raises OutOfRange for more of them than one request may hold."""
        self.check_num_items("tokens", len(token_ids))
        return await self.tokenizer.detokenize(token_ids)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words that must not appear, each also as it follows a space.

        The rule is vLLM's: the form with the space counts when it differs in its first token and
        is as long.
        """
        if not words:
            return ()
        if len(words) > MAX_BAD_WORDS:
            raise InvalidArgument(
                f"bad_words holds {len(words)} entries; at most {MAX_BAD_WORDS}", field="bad_words"
            )
        if sum(map(len, words)) > MAX_BAD_WORDS_CHARACTERS:
            raise InvalidArgument(
                f"bad_words may have {MAX_BAD_WORDS_CHARACTERS} characters in all",
                field="bad_words",
            )
        bare = [word.lstrip() for word in words]
        texts = [*bare, *(" " + word for word in bare)]
        token_ids = await self.tokenizer.encode(
            texts, add_special_tokens=False, max_tokens=4 * MAX_BAD_WORDS_CHARACTERS
        )
        sequences: list[tuple[int, ...]] = []
        for plain, spaced in zip(token_ids[: len(bare)], token_ids[len(bare) :], strict=True):
            sequences.append(tuple(plain))
            if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(tuple(spaced))
        return tuple(sequences)


def _too_long(error: TextTooLong, limits: ModelLimits, num_texts: int) -> StepwellError:
    about = "" if error.is_exact else "more than "
    refusal = prompt_too_long(f"{about}{error.num_tokens} tokens", limits)
    return of_prompt(refusal, error.number, num_texts)


def _width(num_logprobs: int | None) -> int:
    """Columns of a row of log-probabilities."""
    return 0 if num_logprobs is None else num_logprobs + 1
