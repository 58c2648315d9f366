"""Converts messages of the RPC Generate to requests of the core, and pieces of answers to
messages.
"""

import asyncio
from dataclasses import replace

from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import InvalidArgument
from services.common.request.messages import (
    finish_reason_to_proto,
    program_from_proto,
    prompt_embeds_from_proto,
)
from services.common.request.program import DeclaredProgram
from services.common.telemetry.time_parts import time_line
from services.gateway.adapters.access import CALLER
from services.gateway.adapters.http.openai.rendering import render_turns
from services.gateway.adapters.schedulers.converters import (
    client_sampling_from_proto,
    logprobs_to_proto,
)
from services.gateway.adapters.telemetry.high_temperature import noted
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.adapters.telemetry.request_times import parts_of
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import CHAT_ROLES, ClientRequest, Prompt
from services.gateway.core.request.request_check import check_request_id

ID_PREFIX = "gen"


class GenerateRequests:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def client_request(
        self,
        request: gateway_pb2.GenerateRequest,
        record: RequestRecord,
        *,
        is_continuation: bool = False,
    ) -> ClientRequest:
        """Converts a message to a request of the core. If `is_continuation` is true, the tokenizer
        adds no special tokens, because the text continues an earlier text. Raises InvalidArgument
        or OutOfRange if the message is invalid.
        """
        if request.request_id:
            check_request_id(request.request_id)
            record.rename(request.request_id)
        return ClientRequest(
            request_id=request.request_id or f"{ID_PREFIX}-{record.request_id}",
            prompts=(await self._prompt(request, is_continuation=is_continuation),),
            sampling=noted(
                client_sampling_from_proto(request.sampling, self._inference.default_sampling)
            ),
            n=request.n if request.HasField("n") else 1,
            stop=tuple(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=not request.keep_special_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            session_id=request.session_id or request.program.id,
            program=_program(request),
            caller=CALLER.get(),
            adapter=self._inference.adapters.find(request.model),
        )

    async def _prompt(
        self, request: gateway_pb2.GenerateRequest, *, is_continuation: bool
    ) -> Prompt:
        match request.WhichOneof("prompt"):
            case "text":
                if not request.text:
                    raise InvalidArgument("prompt must not be empty", field="text")
                [token_ids] = await self._inference.texts.encode(
                    [request.text], add_special_tokens=not is_continuation
                )
                return Prompt(token_ids)
            case "token_ids":
                self._inference.texts.check_num_items("token_ids", len(request.token_ids.ids))
                return Prompt(list(request.token_ids.ids))
            case "chat":
                return Prompt(await self.chat_tokens(request.chat))
            case "embeds":
                embeds = prompt_embeds_from_proto(request.embeds)
                await asyncio.to_thread(embeds.check_finite)
                return Prompt(embeds.placeholders, embeds=embeds)
        raise InvalidArgument("prompt is missing", field="prompt")

    async def chat_tokens(self, chat: gateway_pb2.Chat) -> list[int]:
        if not chat.messages:
            raise InvalidArgument("messages must not be empty", field="chat.messages")
        for number, turn in enumerate(chat.messages):
            if turn.role not in CHAT_ROLES:
                raise InvalidArgument(
                    f"role must be one of {', '.join(CHAT_ROLES)}, not {turn.role[:40]!r}",
                    field=f"chat.messages[{number}].role",
                )
        text = await render_turns(
            self._inference.tokenizer,
            [{"role": turn.role, "content": turn.content} for turn in chat.messages],
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
        [token_ids] = await self._inference.texts.encode([text], add_special_tokens=False)
        return token_ids


def _program(request: gateway_pb2.GenerateRequest) -> DeclaredProgram | None:
    """Returns the agent program of a message. Raises InvalidArgument if it names two programs."""
    if not request.HasField("program"):
        return DeclaredProgram(request.session_id) if request.session_id else None
    program = program_from_proto(request.program)
    if request.session_id and program.id and program.id != request.session_id:
        raise InvalidArgument(
            "session_id and program.id name two different programs", field="session_id"
        )
    return replace(program, id=program.id or request.session_id)


def to_response(
    piece: Piece, generation: Generation, timed: RequestRecord | None
) -> gateway_pb2.GenerateResponse:
    """Converts a piece of an answer to a message. `timed` is the record whose times are sent to the
    client, or None if the client did not request times.
    """
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
        if timed is not None:
            response.metrics.CopyFrom(_metrics(timed))
    if isinstance(piece.stop_reason, str):
        response.stop_string = piece.stop_reason
    elif piece.stop_reason is not None:
        response.stop_token_id = piece.stop_reason
    return response


def _metrics(record: RequestRecord) -> gateway_pb2.RequestMetrics:
    parts = parts_of(record)
    return gateway_pb2.RequestMetrics(
        line=time_line(parts),
        seconds=sum(part.nanos for part in parts) / 1e9,
        parts=[gateway_pb2.TimePart(name=part.name, seconds=part.seconds) for part in parts],
    )
