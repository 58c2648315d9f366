"""The base class of the dialects of completions and chat completions."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from services.common.request.finish import FinishReason
from services.gateway.adapters.http.exchange.dialect import (
    ConvertedRequest,
    StreamingDialect,
    event,
)
from services.gateway.adapters.http.exchange.json_pieces import (
    HoldsLongList,
    LongList,
    json_pieces,
    listed,
    to_json,
)
from services.gateway.adapters.http.openai.bodies import SamplingBody, StreamOptions
from services.gateway.adapters.http.openai.logprobs import prompt_logprobs, token_number, token_text
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.logprobs import LogprobRows

_TEXT, _TOKEN_ID = "\0", "\1"
"""Placeholders for the text and the token ids in the chunk from which a TextFrame is made. The
placeholder of the text is first. The placeholder of the ids may be absent.
"""


class Dialect(StreamingDialect):
    """Writes answers and chunks of completions and chat completions. Subclasses write the choices,
    and this class writes the JSON around them.
    """

    whole_object: str
    chunk_object: str

    def __init__(self, converted: ConvertedRequest[SamplingBody]) -> None:
        body = converted.body
        self.request = converted.request
        self.tokenizer = converted.tokenizer
        self.return_token_ids = bool(body.return_token_ids)
        self.token_text = token_number if body.return_tokens_as_token_ids else token_text
        self.return_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._usage_in_every_chunk = bool(options.continuous_usage_stats)
        self._origin = {"created": converted.created, "model": converted.model_name}
        head = to_json(self._head(self.chunk_object)).encode()
        tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._frame_without_usage = b"data: " + head[:-1] + b',"choices":[', tail
        self._text_frames: dict[int, TextFrame | None] = {}
        """Maps the index of an answer to its TextFrame. Its value is None after the first text,
        whose chunk may have further fields. The TextFrame is made for the second text.
        """

    def opening(self, _usage: Usage) -> list[dict[str, Any]]:
        """Returns the choices that are sent before the first token, each in its own chunk."""
        return []

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns the choice that contains a whole answer."""

    def extras(self, _answers: Sequence[Answer]) -> dict[str, Any]:
        return {}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed. Its choices are generated while the
        body is sent.
        """
        choices = (self.choice(index, answer) for index, answer in enumerate(answers))
        return {
            **self._head(self.whole_object),
            "choices": LongList(choices, nested=True),
            "usage": usage_body(usage),
            **self.extras(answers),
        }

    def prompt_logprobs(self, rows: LogprobRows | None) -> list[Any] | LongList:
        """Returns vLLM's field `prompt_logprobs`. The entry of the first token is None."""
        return listed(prompt_logprobs(rows, self.tokenizer), 1 + len(rows or ()))

    def text_event(self, piece: Piece) -> bytes | None:
        """Encodes a piece with a TextFrame, or returns None if `chunks` must write it."""
        if not piece.is_text or self._usage_in_every_chunk:
            return None
        index = piece.index
        frame = self._text_frames.get(index)
        if frame is None:
            if index not in self._text_frames:
                self._text_frames[index] = None
                return None
            head, tail = self._frame_without_usage
            (chunk,) = self.chunks(TextFrame.marked(index))
            frame = self._text_frames[index] = TextFrame(head.decode(), chunk, tail.decode())
        return frame.event(piece)

    def encode_chunks(
        self, chunks: Sequence[dict[str, Any]], usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        """Encodes one server-sent event for each choice, and joins events without long lists. Calls
        `usage` only if every chunk must contain token counts.
        """
        head, tail = self._frame(usage)
        events: list[bytes] = []
        for choice in chunks:
            try:
                events.append(head + to_json(choice).encode() + tail)
            except HoldsLongList:
                yield b"".join([*events, head])
                yield from json_pieces(choice)
                events = [tail]
        yield b"".join(events)

    def closing(self, usage: Usage, metrics: dict[str, Any] | None) -> bytes:
        """Returns the last events: the end mark, and before it the token counts and times that the
        client requested.
        """
        if not self._include_usage and metrics is None:
            return b"data: [DONE]\n\n"
        body: dict[str, Any] = {**self._head(self.chunk_object), "choices": []}
        if self._include_usage:
            body["usage"] = usage_body(usage)
        if metrics is not None:
            body["metrics"] = metrics
        return event(body) + b"data: [DONE]\n\n"

    def _frame(self, usage: Callable[[], Usage]) -> tuple[bytes, bytes]:
        if not self._usage_in_every_chunk:
            return self._frame_without_usage
        counts = to_json(usage_body(usage())).encode()
        return self._frame_without_usage[0], b'],"usage":' + counts + b"}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request.request_id, "object": kind, **self._origin}


def stop_reason(piece: Piece) -> str | int | None:
    """Returns what ended an answer, as vLLM writes it: the stop string, the stop token's id, or a
    name for a repetition. Returns None for other reasons.
    """
    if piece.finish_reason is FinishReason.REPETITION:
        return "repetition_detected"
    return piece.stop_reason


def usage_body(usage: Usage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if usage.num_reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.num_reasoning_tokens}
    return body | clipped_wish(usage)


def clipped_wish(usage: Usage) -> dict[str, str]:
    """Returns the field with the reduced time, if the client requested to keep the prompt cached
    for too long.
    """
    return {"prompt_cache_ttl": "1h"} if usage.is_wish_clipped else {}


class TextFrame:
    """An encoded event with gaps for its text and token ids."""

    __slots__ = ("_after", "_before", "_between", "_has_ids")

    def __init__(self, head: str, chunk: Mapping[str, Any], tail: str) -> None:
        """`chunk` is the chunk of the piece that `marked` returns. `head` and `tail` are an event's
        texts before and after the chunk.
        """
        before, rest = to_json(chunk).split(to_json(_TEXT))
        self._between, self._has_ids, after = rest.partition(to_json(_TOKEN_ID))
        self._before, self._after = head + before, after + tail

    @staticmethod
    def marked(index: int) -> Piece:
        """Returns a piece that has placeholders in place of its text and token ids."""
        return Piece(index, _TEXT, cast(list[int], [_TOKEN_ID]))

    def event(self, piece: Piece) -> bytes:
        ids = ",".join(map(str, piece.token_ids)) if self._has_ids else ""
        return f"{self._before}{to_json(piece.text)}{self._between}{ids}{self._after}".encode()
