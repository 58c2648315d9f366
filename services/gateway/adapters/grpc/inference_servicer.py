"""The gRPC service `Inference`: converts messages to requests of the core and back."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

import grpc
from google.protobuf.message import Message
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.errors import InvalidArgument
from services.common.request.pooling import PoolingParams
from services.common.request.sampling import SamplingParams
from services.common.rpc.server import Context
from services.common.telemetry import names
from services.gateway.adapters.access import CALLER
from services.gateway.adapters.grpc.generate_requests import (
    ID_PREFIX,
    GenerateRequests,
    to_response,
)
from services.gateway.adapters.grpc.message_stream import AnswerStreams
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import (
    CALL_ARRIVAL,
    CALL_RECORD,
    RequestRecord,
)
from services.gateway.core.fleet.membership import Membership
from services.gateway.core.gate import Gate
from services.gateway.core.request.arrivals import Arrival
from services.gateway.core.request.delivery import Answers
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.core.request.request_check import check_request_id
from services.gateway.core.request.vectors import numbers
from services.gateway.core.traces.timeline import Part
from services.gateway.options.option import Options, StreamCall

_EMBED_API = "embd"
METHOD_PREFIX = "/stepwell.gateway.v1.Inference/"
GENERATE = f"{METHOD_PREFIX}Generate"
EMBED = f"{METHOD_PREFIX}Embed"
_METHODS = gateway_pb2.DESCRIPTOR.services_by_name["Inference"].methods
REQUEST_TYPES: dict[str, type[Message]] = {
    f"{METHOD_PREFIX}{method.name}": getattr(gateway_pb2, method.input_type.name)
    for method in _METHODS
    if not method.client_streaming
}
"""Maps the full name of each method with a single request message to the type of the message."""
STREAM_TYPES: dict[str, type[Message]] = {
    f"{METHOD_PREFIX}{method.name}": getattr(gateway_pb2, method.input_type.name)
    for method in _METHODS
    if method.client_streaming
}
"""Maps the full name of each method with a stream of request messages to the type of a message."""


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """Serves inference over gRPC."""

    def __init__(
        self,
        inference: Inference,
        options: Options,
        membership: Membership,
        gate: Gate,
        observer: Observer,
        streams: AnswerStreams,
        calls: Mapping[str, StreamCall],
    ) -> None:
        """`calls` maps the names of methods with request streams to their handlers."""
        self._inference = inference
        self._options = options
        self._membership = membership
        self._gate = gate
        self._observer = observer
        self._calls = calls
        self._streams = streams
        self._requests = GenerateRequests(inference)
        self.others: Sequence[InferenceServicer] = ()
        """The servicers of the other models that this gateway serves."""

    def arriving(self, context: Context) -> Arrival:
        """Begins to count a call as arriving, before its message is read. The returned Arrival
        counts the call until its sequences are queued for a replica. Raises an error if the gateway
        or the replicas have no room for the call.
        """
        caller, record = CALLER.get(), CALL_RECORD.get()
        with self._observer.counting_refusals(record, caller):
            self._gate.check()
            needs_room = self._options.needs_room(record.headers, caller)
            deadline = deadline_of_call(context)
            return self._inference.arriving(caller, deadline, needs_room=needs_room)

    async def Generate(  # type: ignore[override]  # the stubs know generators alone
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        caller = CALLER.get()
        record = CALL_RECORD.get()
        with self._observer.counting_refusals(record, caller):
            self._inference.check_model(request.model, caller)
        is_chat = request.WhichOneof("prompt") == "chat"
        operation = names.GENAI_OPERATION_CHAT if is_chat else names.GENAI_OPERATION_TEXT_COMPLETION
        async with AsyncExitStack() as work:
            observing = self._observer.observing(operation, record, caller)
            observation = work.enter_context(observing)
            work.enter_context(self._gate.enter())
            deadline = deadline_of_call(context)
            await self._inference.until_limits(record.wait)
            record.enter(Part.TOKENIZE)
            client_request = await self._requests.client_request(request, record)
            generation = await self._prepare(client_request, record, deadline, ID_PREFIX)
            record.enter(Part.PREPARE)
            await self._streams.send(
                generation,
                lambda piece: to_response(
                    piece, generation, record if request.include_metrics else None
                ),
                context,
                record,
                observation,
                CALL_ARRIVAL.get(),
                work,
            )

    async def GenerateSession(  # type: ignore[override]  # the stubs know generators alone
        self, request_iterator: AsyncIterator[gateway_pb2.GenerateSessionRequest], context: Context
    ) -> None:
        if (call := self._calls.get("GenerateSession")) is None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this server does not support sessions"
            )
        await call(request_iterator, context)

    async def _prepare(
        self, client_request: ClientRequest, record: RequestRecord, deadline: float | None, api: str
    ) -> Generation:
        record.enter(Part.PREPARE)
        generation = await self._inference.prepare(client_request, record.trace_headers, deadline)
        return await self._options.before_queue(generation, record, api)

    async def Embed(
        self, request: gateway_pb2.EmbedRequest, context: Context
    ) -> gateway_pb2.EmbedResponse:
        caller, record = CALLER.get(), CALL_RECORD.get()
        with self._observer.counting_refusals(record, caller):
            self._inference.check_model(request.model, caller)
        async with AsyncExitStack() as work:
            observing = self._observer.observing(names.GENAI_OPERATION_EMBEDDINGS, record, caller)
            observation = work.enter_context(observing)
            work.enter_context(self._gate.enter())
            deadline = deadline_of_call(context)
            await self._inference.until_limits(record.wait)
            record.enter(Part.TOKENIZE)
            client_request = await self._embed_request(request, record)
            generation = await self._prepare(client_request, record, deadline, _EMBED_API)
            record.enter(Part.PREPARE)
            sink = Answers(generation)
            with observation.watching(generation, sink, stream=False) as watched:
                CALL_ARRIVAL.get().end()
                await self._inference.delivery(generation, watched, stream=False).run()
            usage = generation.usage()
            return gateway_pb2.EmbedResponse(
                request_id=client_request.request_id,
                vectors=[
                    gateway_pb2.Vector(values=numbers(answer.pooled)) for answer in sink.answers
                ],
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
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            session_id=request.session_id,
            caller=CALLER.get(),
            adapter=self._inference.adapters.find(request.model),
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
                [token_ids] = await self._inference.texts.encode(
                    [given.text], add_special_tokens=True
                )
                return Prompt(token_ids)
            case "token_ids":
                self._inference.texts.check_num_items("token_ids", len(given.token_ids.ids))
                return Prompt(list(given.token_ids.ids))
            case "pair" if given.pair.first and given.pair.second:
                pair = given.pair.first, given.pair.second
                [(token_ids, num_first)] = await self._inference.texts.encode_pairs([pair])
                return Prompt(token_ids, num_first_text_tokens=num_first)
        raise InvalidArgument(f"inputs[{number}] is empty", field=f"inputs[{number}]")

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeResponse:
        self._inference.check_model(request.model, CALLER.get())
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("prompt is missing", field="prompt")
        if kind == "chat":
            token_ids = await self._requests.chat_tokens(request.chat)
        else:
            token_ids = await self._inference.texts.tokenize(
                request.text, add_special_tokens=not request.skip_special_tokens
            )
        limits = self._inference.limits()
        return gateway_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=limits.max_model_len)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        self._inference.check_model(request.model, CALLER.get())
        text = await self._inference.texts.detokenize(request.token_ids)
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, _request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        models = [model for one in (self, *self.others) for model in one.models()]
        caller = CALLER.get()
        return gateway_pb2.ListModelsResponse(
            models=[model for model in models if caller.may_use(model.name)]
        )

    def models(self) -> list[gateway_pb2.Model]:
        """Describes the model and its adapters, as ListModels lists them."""
        base = self._inference.model_name
        return [
            gateway_pb2.Model(
                name=name,
                max_model_len=self._membership.max_model_len() or 0,
                num_ready_replicas=self._membership.num_ready,
                parent="" if name == base else base,
            )
            for name in self._inference.names()
        ]


def deadline_of_call(context: Context) -> float | None:
    """Returns the call's deadline on the event loop's clock. Returns None if it has no deadline."""
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining
