"""Clients of a gateway, over gRPC and over HTTP."""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from services.common.request.messages import program_to_proto
from services.common.rpc.channel import open_channel
from services.simulation.explore.answer import Answer
from services.simulation.explore.http_clients import LOST, ask_http
from services.simulation.explore.requests import Edge, Kind, Request

_GRPC_PORT = 9000
_RETRY_SECONDS = 0.1
_REFUSED = re.compile("RESOURCE_EXHAUSTED|429|503|.*queue_full")


async def ask(
    gateway: str, request: Request, answer: Answer, *, name: str = "", retries: bool = False
) -> None:
    """Sends a request with the id `name`, and adds the received parts to `answer`. A request with
    an idempotency key is sent again after any error, and a refused request if `retries` is set.
    """
    while True:
        await _ask_once(gateway, request, answer, name)
        was_refused = retries and _REFUSED.match(answer.error or "")
        if answer.error is None or not (request.key or was_refused):
            return
        await asyncio.sleep(_RETRY_SECONDS)
        answer.clear()


async def _ask_once(gateway: str, request: Request, answer: Answer, name: str) -> None:
    try:
        if request.edge is Edge.GRPC:
            async with open_channel(f"{gateway}:{_GRPC_PORT}") as channel:
                await _ask_grpc(gateway_pb2_grpc.InferenceStub(channel), request, answer, name)
        else:
            await ask_http(gateway, request, answer, name)
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    except LOST as error:
        answer.error = f"{type(error).__name__}: {error}"


# Requests over gRPC.


async def _ask_grpc(stub: Any, request: Request, answer: Answer, name: str) -> None:
    if request.kind is Kind.VECTOR:
        prompt = gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=request.prompt))
        vectors = await stub.Embed(gateway_pb2.EmbedRequest(inputs=[prompt]))
        for index, vector in enumerate(vectors.vectors):
            answer.add_vector(index, vector.values)
    elif request.kind is Kind.TURNS:
        await _ask_turns(stub, request, answer)
    elif request.kind is Kind.TALK:
        await _talk(stub, request, answer)
    else:
        metadata = (("idempotency-key", request.key),) if request.key else ()
        message = _message(request, request.prompt)
        message.request_id = name
        async for piece in stub.Generate(message, metadata=metadata):
            _take_piece(piece.index, piece, answer)


async def _talk(stub: Any, request: Request, answer: Answer) -> None:
    conversation: list[int] = []
    for number, prompt in enumerate((request.prompt, *request.later_prompts)):
        conversation += prompt
        message = _message(request, conversation)
        if number < len(request.later_prompts):
            message.program.ends = False
        async for piece in stub.Generate(message):
            _take_piece(number, piece, answer)
        conversation += answer.token_ids[number]
        await asyncio.sleep(request.pause_seconds)


async def _ask_turns(stub: Any, request: Request, answer: Answer) -> None:
    call = stub.GenerateSession()
    try:
        for number, prompt in enumerate((request.prompt, *request.later_prompts)):
            turn = gateway_pb2.GenerateSessionRequest(turn=_message(request, prompt))
            await call.write(turn)
            while number not in answer.finished:
                response = await call.read()
                if response is grpc.aio.EOF:
                    raise EOFError("the session has ended")
                _take_piece(response.turn, response.piece, answer)
            await asyncio.sleep(request.pause_seconds)
        await call.done_writing()
        await call.read()
    except asyncio.InvalidStateError:  # the call has ended, and `read` raises its error
        await call.read()
        raise


def _message(request: Request, prompt: Iterable[int]) -> gateway_pb2.GenerateRequest:
    message = gateway_pb2.GenerateRequest(
        model=request.model,
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(**request.sampling()),
        n=request.n,
        stop=request.stop,
        ignore_eos=request.ignores_end,
        cache_salt=request.salt,
        program=program_to_proto(request.program),
        priority=request.priority,
    )
    if request.regex:
        forms = message.sampling.structured_outputs
        forms.kind, forms.text = common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, request.regex
    return message


def _take_piece(index: int, piece: gateway_pb2.GenerateResponse, answer: Answer) -> None:
    answer.add(index, piece.text, piece.token_ids)
    for rows in (piece.prompt_logprobs, piece.logprobs):
        if rows.logprobs:
            answer.logprobs.setdefault(index, []).extend(rows.logprobs)
    answer.num_cached_tokens += piece.usage.num_cached_tokens
    if piece.finish_reason:
        name = common_pb2.FinishReason.Name(piece.finish_reason)
        answer.finished[index] = name.removeprefix("FINISH_REASON_").lower()
