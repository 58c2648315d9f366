"""The gRPC service `Inference`: converts messages to requests of the core and back."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common import names
from services.common.errors import InvalidArgument
from services.common.finish_reason_proto import finish_reason_to_proto
from services.common.pooling import PoolingParams
from services.common.prompt_embeds_proto import prompt_embeds_from_proto
from services.common.sampling import SamplingParams
from services.gateway.adapters.auth import CALL_ALLOWANCE, CALL_TENANT
from services.gateway.adapters.converters import (
    client_sampling_from_proto,
    logprobs_to_proto,
)
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.observation import Observer
from services.gateway.adapters.request_record import CALL_RECORD, RequestRecord
from services.gateway.adapters.stream_reader_timeout import StreamReaderTimeout
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.choice import Piece
from services.gateway.core.gate import Gate
from services.gateway.core.generation import Answer, Generation
from services.gateway.core.idempotency.key import FIELD, IdempotencyKey, idempotency_key
from services.gateway.core.idempotency.keyed_requests import KeyedRequests
from services.gateway.core.inference import Inference
from services.gateway.core.limits.tenant_limits import NO_LIMITS, Allowance, TenantLimits
from services.gateway.core.membership import Membership
from services.gateway.core.request import CHAT_ROLES, ClientRequest, Prompt, check_request_id
from services.gateway.core.tenant import Tenant
from services.gateway.core.timeline import Part
from services.gateway.core.vectors import numbers

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


_API, _EMBED_API = "gen", "embd"
"""The kinds of these answers."""
METHOD_PREFIX = "/stepwell.gateway.v1.Inference/"
GENERATE = f"{METHOD_PREFIX}Generate"
EMBED = f"{METHOD_PREFIX}Embed"
REQUEST_TYPES: dict[str, type[Message]] = {
    f"{METHOD_PREFIX}{method.name}": getattr(gateway_pb2, method.input_type.name)
    for method in gateway_pb2.DESCRIPTOR.services_by_name["Inference"].methods
}
"""The message of each method, by its full name."""


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """Inference over the same core as HTTP."""

    def __init__(
        self,
        inference: Inference,
        keyed_requests: KeyedRequests,
        membership: Membership,
        gate: Gate,
        observer: Observer,
        metrics: Metrics,
        limits: TenantLimits,
        *,
        reader_timeout_seconds: float,
    ) -> None:
        self._inference = inference
        self._keyed_requests = keyed_requests
        self._membership = membership
        self._gate = gate
        self._observer = observer
        self._metrics = metrics
        self._limits = limits
        self._reader_timeout_seconds = reader_timeout_seconds

    @contextmanager
    def arriving(self, context: Context) -> Iterator[None]:
        """Counts a call of Generate while its message is read. Raises what Generate would, while
        there is no room for it.
        """
        with ExitStack() as entered:
            with self._observer.counting_refusals(CALL_RECORD.get(), CALL_TENANT.get()):
                self._gate.check()
                entered.enter_context(self._arriving(_key(context), _deadline(context)))
            yield

    async def admit(self, tenant: Tenant) -> Allowance:
        """What Generate takes of its tenant's limits. Raises LimitReached."""
        with self._observer.counting_refusals(CALL_RECORD.get(), tenant):
            return await self._limits.admit(tenant)

    def _arriving(self, key: IdempotencyKey | None, deadline: float | None) -> Arrival:
        needs_room = key is None or not self._keyed_requests.knows(key)
        return self._inference.arriving(CALL_TENANT.get(), deadline, needs_room=needs_room)

    async def Generate(  # type: ignore[override]  # the stubs know generators alone
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        tenant = CALL_TENANT.get()
        record = CALL_RECORD.get()
        with self._observer.counting_refusals(record, tenant):
            self._inference.check_model(request.model, tenant)
        is_chat = request.WhichOneof("prompt") == "chat"
        operation = names.GENAI_OPERATION_CHAT if is_chat else names.GENAI_OPERATION_TEXT_COMPLETION
        async with AsyncExitStack() as work:
            observing = self._observer.observing(operation, record, tenant)
            observation = work.enter_context(observing)
            work.enter_context(self._gate.enter())
            deadline = _deadline(context)
            key = _key(context)
            arrival = work.enter_context(self._arriving(key, deadline))
            record.enter(Part.TOKENIZE)
            client_request = await self._client_request(request, record)
            generation = await self._prepare(client_request, record, deadline)
            if key is not None:
                record.wait("idempotency_key")
                generation = await self._keyed_requests.attach(
                    generation, key, _API, self._inference.again
                )
            record.enter(Part.PREPARE)
            pieces = observation.watch(generation, self._inference.run(generation), stream=True)
            source = await work.enter_async_context(aclosing(pieces))
            arrival.end()
            with StreamReaderTimeout(
                work, self._reader_timeout_seconds, self._reader_timed_out
            ) as reader:
                async for added in source:
                    for piece in added:
                        if not piece.is_empty:
                            reader.sending()
                            await context.write(_to_response(piece, generation))
                            record.write_nanos += reader.sent()

    async def _prepare(
        self, client_request: ClientRequest, record: RequestRecord, deadline: float | None
    ) -> Generation:
        """The request, checked, with the tokens reserved that it may take."""
        record.enter(Part.PREPARE)
        generation = await self._inference.prepare(client_request, record.trace_headers, deadline)
        allowance = CALL_ALLOWANCE.get()
        if allowance is not NO_LIMITS:
            record.wait("limits")
        await allowance.reserve(generation)
        return generation

    async def Embed(
        self, request: gateway_pb2.EmbedRequest, context: Context
    ) -> gateway_pb2.EmbedResponse:
        tenant, record = CALL_TENANT.get(), CALL_RECORD.get()
        with self._observer.counting_refusals(record, tenant):
            self._inference.check_model(request.model, tenant)
        async with AsyncExitStack() as work:
            observing = self._observer.observing(names.GENAI_OPERATION_EMBEDDINGS, record, tenant)
            observation = work.enter_context(observing)
            work.enter_context(self._gate.enter())
            deadline = _deadline(context)
            arrival = work.enter_context(self._arriving(None, deadline))
            record.enter(Part.TOKENIZE)
            client_request = await self._embed_request(request, record)
            generation = await self._prepare(client_request, record, deadline)
            record.enter(Part.PREPARE)
            pieces = observation.watch(generation, self._inference.run(generation), stream=False)
            source = await work.enter_async_context(aclosing(pieces))
            arrival.end()
            answers = [Answer() for _ in generation.choices]
            async for added in source:
                for piece in added:
                    answers[piece.index].add(piece)
            usage = generation.usage()
            return gateway_pb2.EmbedResponse(
                request_id=client_request.request_id,
                vectors=[gateway_pb2.Vector(values=numbers(answer.pooled)) for answer in answers],
                usage=gateway_pb2.Usage(
                    num_prompt_tokens=usage.num_prompt_tokens,
                    num_cached_tokens=usage.num_cached_tokens,
                ),
            )

    async def _embed_request(
        self, request: gateway_pb2.EmbedRequest, record: RequestRecord
    ) -> ClientRequest:
        self._inference.check_pools()
        if request.request_id:
            check_request_id(request.request_id)
            record.rename(request.request_id)
        self._inference.check_num_choices(len(request.inputs), 1)
        prompts = [await self._embed_prompt(one, n) for n, one in enumerate(request.inputs)]
        return ClientRequest(
            request_id=request.request_id or f"{_EMBED_API}-{record.request_id}",
            prompts=tuple(prompts),
            sampling=SamplingParams(),
            priority=request.priority,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            tenant=CALL_TENANT.get(),
            pooling=PoolingParams(
                dimensions=request.dimensions if request.HasField("dimensions") else None,
                use_activation=request.use_activation
                if request.HasField("use_activation")
                else None,
            ),
        )

    async def _embed_prompt(self, given: gateway_pb2.EmbedInput, number: int) -> Prompt:
        match given.WhichOneof("prompt"):
            case "text" if given.text:
                [token_ids] = await self._inference.encode([given.text], add_special_tokens=True)
                return Prompt(token_ids)
            case "token_ids":
                self._inference.check_num_items("token_ids", len(given.token_ids.ids))
                return Prompt(list(given.token_ids.ids))
            case "pair" if given.pair.first and given.pair.second:
                pair = given.pair.first, given.pair.second
                [(token_ids, num_first)] = await self._inference.encode_pairs([pair])
                return Prompt(token_ids, num_first_text_tokens=num_first)
        raise InvalidArgument(f"inputs[{number}] is empty", field=f"inputs[{number}]")

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeResponse:
        self._inference.check_model(request.model, CALL_TENANT.get())
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("prompt is missing", field="prompt")
        if kind == "chat":
            token_ids = await self._chat_tokens(request.chat)
        else:
            token_ids = await self._inference.tokenize(
                request.text, add_special_tokens=not request.skip_special_tokens
            )
        limits = self._inference.limits()
        return gateway_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=limits.max_model_len)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        self._inference.check_model(request.model, CALL_TENANT.get())
        text = await self._inference.detokenize(request.token_ids)
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, _request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        if not CALL_TENANT.get().may_use(self._inference.model_name):
            return gateway_pb2.ListModelsResponse()
        model = gateway_pb2.Model(
            name=self._inference.model_name,
            max_model_len=self._membership.max_model_len() or 0,
            num_ready_replicas=self._membership.num_ready,
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    def _reader_timed_out(self) -> None:
        self._metrics.reader_timed_out("grpc")
        logger.warning("a gRPC client stopped reading: its request is ended")

    async def _client_request(
        self, request: gateway_pb2.GenerateRequest, record: RequestRecord
    ) -> ClientRequest:
        if request.request_id:
            check_request_id(request.request_id)
            record.rename(request.request_id)
        return ClientRequest(
            request_id=request.request_id or f"{_API}-{record.request_id}",
            prompts=(await self._prompt(request),),
            sampling=client_sampling_from_proto(request.sampling, self._inference.default_sampling),
            n=request.n if request.HasField("n") else 1,
            stop=tuple(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=not request.keep_special_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            session_id=request.session_id,
            tenant=CALL_TENANT.get(),
        )

    async def _prompt(self, request: gateway_pb2.GenerateRequest) -> Prompt:
        match request.WhichOneof("prompt"):
            case "text":
                if not request.text:
                    raise InvalidArgument("prompt must not be empty", field="text")
                [token_ids] = await self._inference.encode([request.text], add_special_tokens=True)
                return Prompt(token_ids)
            case "token_ids":
                self._inference.check_num_items("token_ids", len(request.token_ids.ids))
                return Prompt(list(request.token_ids.ids))
            case "chat":
                return Prompt(await self._chat_tokens(request.chat))
            case "embeds":
                embeds = prompt_embeds_from_proto(request.embeds)
                await asyncio.to_thread(embeds.check_finite)
                return Prompt(embeds.placeholders, embeds=embeds)
        raise InvalidArgument("prompt is missing", field="prompt")

    async def _chat_tokens(self, chat: gateway_pb2.Chat) -> list[int]:
        if not chat.messages:
            raise InvalidArgument("messages must not be empty", field="chat.messages")
        for number, turn in enumerate(chat.messages):
            if turn.role not in CHAT_ROLES:
                raise InvalidArgument(
                    f"role must be one of {', '.join(CHAT_ROLES)}, not {turn.role[:40]!r}",
                    field=f"chat.messages[{number}].role",
                )
        tokenizer = self._inference.tokenizer
        text = await tokenizer.render_chat(
            [{"role": turn.role, "content": turn.content} for turn in chat.messages],
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
        [token_ids] = await self._inference.encode([text], add_special_tokens=False)
        return token_ids


def _key(context: Context) -> IdempotencyKey | None:
    """The idempotency key in the call's metadata. Raises InvalidArgument."""
    value = dict(context.invocation_metadata() or ()).get(FIELD.lower())
    return idempotency_key(None if value is None else str(value), CALL_TENANT.get())


def _deadline(context: Context) -> float | None:
    """The call's deadline on the event loop's clock."""
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining


def _to_response(piece: Piece, generation: Generation) -> gateway_pb2.GenerateResponse:
    response = gateway_pb2.GenerateResponse(
        request_id=generation.request.request_id,
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=logprobs_to_proto(piece.logprobs),
        prompt_logprobs=logprobs_to_proto(piece.prompt_logprobs),
    )
    if piece.finish_reason is not None:
        choice = generation.choices[piece.index]
        response.finish_reason = finish_reason_to_proto(piece.finish_reason)
        response.usage.num_prompt_tokens = choice.num_prompt_tokens
        response.usage.num_cached_tokens = choice.num_cached_tokens
        response.usage.num_generated_tokens = choice.num_output_tokens
    if isinstance(piece.stop_reason, str):
        response.stop_string = piece.stop_reason
    elif piece.stop_reason is not None:
        response.stop_token_id = piece.stop_reason
    return response
