"""Prepares the requests of all protocols: checks a request, and makes its Generation, the object
that represents the request while it runs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.errors import InvalidArgument, NotFound, OutOfRange, StepwellError
from services.common.request.pooling import Pooler, PoolingTask
from services.common.request.structured_outputs import StructuredOutputs
from services.common.telemetry.trace_headers import UNTRACED, TraceHeaders
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.lora_modules import LoraModules
from services.gateway.core.ports import Grammars, Tokenizer
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.delivery import TOKENS_AT_A_TIME, Delivery, Sink
from services.gateway.core.request.engine import Engine
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import ClientRequest, to_engine_requests
from services.gateway.core.request.request_check import (
    OTHER_RUNNER,
    check_prompt,
    check_request,
    of_prompt,
)
from services.gateway.core.request.sampling_defaults import SamplingDefaults
from services.gateway.core.request.tokenization import Tokenization
from services.gateway.core.text.parsing.output_form import NO_FORMATS, OutputFormats
from services.gateway.core.text.parsing.special_tokens import SpecialTokens

_TOKENS_CHECKED_AT_A_TIME = 65_536
"""Number of prompt tokens that are checked in one iteration of the event loop."""
_MAX_NAMES = 8
"""Limit on the number of model names that an error message lists."""
_ANSWERS_AT_A_TIME = 32
"""If a request has more answers than this number, the event loop can do other work between the
stages of the request's preparation.
"""


class Inference:
    """Checks clients' requests, tokenizes prompts, and makes Generations. The handlers of both HTTP
    and gRPC use this class.
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
        """A request may have at most `max_choices` answers and at most `max_items` values in a
        list. Answers that are not streamed may have at most `max_logprobs` log-probabilities in
        total. In a stream, `stream_interval` tokens are sent together. `draw_seed` returns random
        seeds below 2**64.
        """
        self.model_name = model_name
        self.others: Sequence[Inference] = ()
        """The other models that this gateway serves."""
        self.adapters = adapters or LoraModules(model_name)
        self.tokenizer = tokenizer
        self.special_tokens = SpecialTokens(tokenizer)
        self.output_formats = output_formats
        self.default_sampling = defaults.sampling
        self.texts = Tokenization(tokenizer, self.limits, max_items)
        self.max_logprobs = max_logprobs
        self._defaults = defaults
        self._engine = engine
        self._grammars = grammars
        self._max_choices = max_choices
        self._stream_interval = stream_interval
        self._draw_seed = draw_seed
        self._unix_nanos = unix_nanos

    def check_model(self, name: str | None, caller: Caller = ANYONE) -> None:
        """Raises NotFound if `name` is neither the model's name, the name of an adapter, nor empty.
        Raises PermissionDenied if the caller may not use the named model or adapter.
        """
        if (adapter := self.adapters.find(name)) is not None:
            caller.check_model(adapter.name)
            return
        if name and name != self.model_name:
            if any(name in other.names() for other in self.others):
                raise NotFound(
                    f"the request's path, or an earlier field `model`, sent it to the model "
                    f"{self.model_name!r}, and not to {name!r}",
                    field="model",
                    reason="MODEL_NOT_FOUND",
                )
            raise NotFound(
                f"this server has no model {name[:100]!r}; its models are "
                f"{self._names_for(caller)}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )
        caller.check_model(self.model_name)

    def names(self) -> list[str]:
        """Returns the model names that a request may have: the model's name and its adapters'
        names.
        """
        return [self.model_name, *(adapter.name for adapter in self.adapters)]

    def _names_for(self, caller: Caller) -> str:
        names = [name for model in (self, *self.others) for name in model.names()]
        allowed = [repr(name) for name in names if caller.may_use(name)]
        more = f" and {len(allowed) - _MAX_NAMES} more" if len(allowed) > _MAX_NAMES else ""
        return (", ".join(allowed[:_MAX_NAMES]) or "none that this key may use") + more

    def limits(self) -> ModelLimits:
        """Returns the limits of a request. Raises Unavailable before the first replica is ready.

        The tokenizer's end-of-sequence token is added to the end-of-sequence tokens of the model's
        configuration, as in vLLM, because fine-tuned chat models often change only the tokenizer.
        """
        limits = self._engine.limits()
        eos_token_id = self.tokenizer.eos_token_id
        if eos_token_id is None or eos_token_id in limits.eos_token_ids:
            return limits
        if eos_token_id >= limits.vocab_size:  # The model cannot generate this token.
            return limits
        return replace(limits, eos_token_ids=(*limits.eos_token_ids, eos_token_id))

    async def until_limits(self, on_wait: Callable[[str], None]) -> None:
        """Waits for the first replica, such as one that an autoscaler starts for this request. Call
        this method before a request is tokenized. Before a wait, calls `on_wait` with its reason.
        """
        await self._engine.until_limits(on_wait)

    def check_pools(self, task: PoolingTask | None = None) -> Pooler:
        """Returns the model's pooler. Raises InvalidArgument if the model generates text, or if
        `task` is given and is not the pooler's task.
        """
        pooler = self.limits().pooler
        if pooler is None:
            raise InvalidArgument(
                "this model generates text and gives no embeddings or scores: use "
                "/v1/completions, /v1/chat/completions, /v1/messages or /v1/responses",
                field="model",
                reason=OTHER_RUNNER,
            )
        if task is not None and pooler.task is not task:
            raise InvalidArgument(
                "this model gives scores, not embeddings: use /score"
                if task is PoolingTask.EMBED
                else "this model gives embeddings, not classes: use /v1/embeddings",
                field="model",
                reason=OTHER_RUNNER,
            )
        return pooler

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        """Raises ResourceExhausted if the engine would refuse another request, and DeadlineExceeded
        if the request would not end by `deadline`.

        Call this method before tokenization: under overload most requests are refused, and
        tokenizing their prompts would be wasted work.
        """
        self._engine.check_room(caller, deadline)

    def arriving(
        self, caller: Caller, deadline: float | None, *, needs_room: bool = True
    ) -> Arrival:
        """Raises the errors of `check_room`, and otherwise counts the request as arriving until
        `end` of the returned Arrival is called. If `needs_room` is false, because the request's
        answer already exists, the request is neither checked nor counted.
        """
        if not needs_room:
            return Arrival(Counter(), caller)
        return self._engine.arriving(caller, deadline)

    async def prepare(
        self, request: ClientRequest, trace: TraceHeaders = UNTRACED, deadline: float | None = None
    ) -> Generation:
        """Checks a request and makes its generation. Raises InvalidArgument or OutOfRange if the
        request is invalid. While a long request is checked, the event loop can do other work.
        """
        limits = self.limits()
        request = self._defaults.bounded(request)
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
        """Raises InvalidArgument if a structured-output constraint cannot be compiled."""
        limits = self.limits()
        await self._grammars.check(wanted, limits.vocab_size, limits.eos_token_ids)

    @staticmethod
    async def _turn_for(num_answers: int) -> None:
        if num_answers > _ANSWERS_AT_A_TIME:
            await asyncio.sleep(0)

    def delivery(self, generation: Generation, sink: Sink, *, stream: bool) -> Delivery:
        """Makes the Delivery that puts a generation's output into a sink. If `stream` is false, it
        puts many tokens together.
        """
        source = generation.source or self._engine
        min_tokens = self._stream_interval if stream else TOKENS_AT_A_TIME
        return Delivery(generation, source, sink, min_tokens)

    def check_num_choices(self, num_prompts: int, n: int, best_of: int | None = None) -> None:
        """Raises InvalidArgument if a request would have too many answers. The prompts need not be
        tokenized yet.
        """
        name, each = ("n", n) if best_of is None else ("best_of", best_of)
        if num_prompts * each > self._max_choices:
            raise InvalidArgument(
                f"{num_prompts} prompts with {name}={each} are {num_prompts * each} answers; a"
                f" request may have at most {self._max_choices}",
                field=name if each > 1 else "prompt",
            )

    def check_num_logprobs(self, generation: Generation) -> None:
        """Raises OutOfRange if the answers, which are not streamed, could have too many
        log-probabilities.
        """
        count = sum(
            (sequence.sampling.max_tokens or 0) * _width(sequence.sampling.logprobs)
            + len(sequence.prompt_token_ids) * _width(sequence.sampling.prompt_logprobs)
            for sequence in generation.sequences
        )
        if count > self.max_logprobs:
            raise OutOfRange(
                f"logprobs: the answers may have {count} log-probabilities, more than the limit of "
                f"{self.max_logprobs} for one request; set stream, or lower max_tokens or n",
                field="logprobs",
            )


def _width(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else num_logprobs + 1
